"""A gather written down naively: what a window must come to, to the bit.

One process, all payloads in memory, one value at a time. Imports nothing of `atoll`: the format is
read anew from its description in `codecs/topk/chunks.py`. Numbers are Python's (fp64 and integers)
and numpy's single fp32 numbers, each operation of which rounds once.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

CHUNK = 4096
F = np.float32


@dataclass(frozen=True)
class Peer:
    """A payload of the whole flat layout, and what is known about it."""

    payload: bytes
    weight: int = 1
    stamp: float | None = None


@dataclass
class Window:
    """What a naive window comes to."""

    uids: list[str]
    weights: list[np.float32]  # the model's, all of them
    norms: dict[str, list[float]]
    factors: dict[str, list[np.float32]]
    shared: dict[tuple[str, str], int]
    equal: dict[tuple[str, str], int]
    copies: list[str] = field(default_factory=list)


# --- the format ---


def magnitude(code: int) -> float:
    """What a byte says."""
    if code == 0:
        return 0.0
    if code == 1:
        return 2.0**-149
    if code <= 14:
        return 2.0 ** (-139 + 9 * (code - 2))
    if code <= 238:
        return (8 + (code - 15) % 8) / 8 * 2.0 ** ((code - 15) // 8 - 22)
    assert code <= 252, code
    return 2.0 ** (6 + 9 * (code - 239))


def bit(number: int, place: int) -> int:
    return number >> place & 1


def chunks(payload: bytes, size: int) -> Iterator[list[tuple[int, int, float]]]:
    """For each chunk what it sends, in order: (place in the layout, 2-bit code, value)."""
    at = 0
    for start in range(0, size, CHUNK):
        kept = math.ceil(min(CHUNK, size - start) / 64)
        lengths = [math.ceil(6 * kept / 8), math.ceil(2 * kept / 8), math.ceil(2 * kept / 8), 2]
        parts = []
        for length in lengths:
            parts.append(payload[at : at + length])
            at += length
        low, high, codes = (int.from_bytes(part, "little") for part in parts[:3])
        found: list[tuple[int, int, float]] = []
        for place in range(2 * kept):
            if bit(high, place):
                i = len(found)
                code = codes >> 2 * i & 3
                value = magnitude(parts[3][code & 1])
                where = start + (place - i) * 64 + (low >> 6 * i & 63)
                found.append((where, code, -value if code & 2 else value))
        assert len(found) == kept
        yield found
    assert at == len(payload)


def sent(payload: bytes, size: int) -> dict[int, tuple[int, float]]:
    """All places that a payload sends, also those with the value 0: their codes and values."""
    return {where: (code, value) for one in chunks(payload, size) for where, code, value in one}


# --- norms, medians, factors ---


def squares(payload: bytes, tensors: Sequence[int]) -> list[float]:
    """norm² of each tensor, given by their sizes: by chunk, then by magnitude, count · value²."""
    totals = [0.0] * len(tensors)
    stops = [sum(tensors[: k + 1]) for k in range(len(tensors))]
    for one in chunks(payload, stops[-1]):
        counts: dict[tuple[int, int], list[float]] = {}
        for where, code, value in one:
            tensor = next(k for k, stop in enumerate(stops) if where < stop)
            entry = counts.setdefault((tensor, code & 1), [0, value * value])
            entry[0] += 1
        for (tensor, _), (count, square) in sorted(counts.items()):
            totals[tensor] += count * square
    return totals


def lower_median(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]


def clipped(norms: Mapping[str, Sequence[float]]) -> dict[str, list[np.float32]]:
    """The factor of each peer's tensors."""
    made: dict[str, list[np.float32]] = {}
    for uid, own in norms.items():
        made[uid] = []
        for tensor, norm in enumerate(own):
            median = lower_median([others[tensor] for others in norms.values()])
            made[uid].append(F(min(1.0, median / (norm + 1e-8))))
    return made


# --- who counts ---


def chosen(primaries: Sequence[str], reserves: Sequence[str], valid: set[str]) -> list[str]:
    """Whom a window takes: valid primaries, and for each missing one the next valid reserve."""
    found = [uid for uid in primaries if uid in valid]
    for uid in reserves:
        if len(found) < len(primaries) and uid in valid and uid not in primaries:
            found.append(uid)
    return sorted(found)


def compared(
    peers: Mapping[str, Mapping[int, tuple[int, float]]],
) -> tuple[dict[tuple[str, str], int], dict[tuple[str, str], int]]:
    """For each pair how many places both send, and at how many the codes are equal."""
    shared, equal = {}, {}
    for a, b in combinations(sorted(peers), 2):
        both = [place for place in peers[a] if place in peers[b]]
        shared[a, b] = len(both)
        equal[a, b] = sum(peers[a][place][0] == peers[b][place][0] for place in both)
    return shared, equal


def copies(
    peers: Mapping[str, Peer], shared: Mapping[tuple[str, str], int], *, kept: int, share: float
) -> list[str]:
    """Who shares too much with somebody whose object came earlier."""
    found = set()
    for (a, b), count in shared.items():
        first, second = peers[a].stamp, peers[b].stamp
        if count / kept >= share and first is not None and second is not None:
            if first < second:
                found.add(b)
            if second < first:
                found.add(a)
    return sorted(found)


# --- the window ---


def window(
    peers: Mapping[str, Peer],
    tensors: Sequence[int],
    weights: Sequence[np.float32],
    *,
    lr: float,
    skip_copies_from: float | None = None,
) -> Window:
    """Weights after a window with these peers, by plain SGD."""
    size = sum(tensors)
    values = {uid: sent(peer.payload, size) for uid, peer in peers.items()}
    shared, equal = compared(values)
    kept = sum(math.ceil(min(CHUNK, size - start) / 64) for start in range(0, size, CHUNK))
    left_out = []
    if skip_copies_from is not None:
        left_out = copies(peers, shared, kept=kept, share=skip_copies_from)
    uids = sorted(set(peers) - set(left_out))
    norms = {uid: [math.sqrt(s) for s in squares(peers[uid].payload, tensors)] for uid in uids}
    factors = clipped(norms)
    of = [k for k, length in enumerate(tensors) for _ in range(length)]  # each element's tensor
    totals: dict[int, np.float32] = {}
    counts: dict[int, int] = {}
    for uid in uids:
        for where, (_, value) in values[uid].items():
            term = (F(value) * factors[uid][of[where]]) * F(peers[uid].weight)
            totals[where] = totals.get(where, F(0.0)) + term
            counts[where] = counts.get(where, 0) + peers[uid].weight
    moved = list(weights)
    for where, total in totals.items():
        moved[where] = weights[where] - (total / F(counts[where])) * F(lr)
    return Window(uids, moved, norms, factors, shared, equal, left_out)
