"""What the ranks of every transport do in sub-groups and by sends, and what must come of it."""

from collections.abc import Iterator, Sequence
from itertools import combinations

import torch
from torch import Tensor

from atoll.collectives import schedule
from atoll.collectives.base import Collectives
from tests.rank_groups import key, values

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
LENGTHS = (0, 1, 3, 1_003)  # none, fewer than ranks, uneven, several chunks
NAMES = (b"", b"one", b"2" * 3_000, b"three", b"4" * 9)


def lists(size: int) -> list[list[int]]:
    """Sub-groups of one to four ranks: overlapping, turned round, and the same ranks twice."""
    ranks = list(range(size))
    found = [[size - 1], [0, size - 1], [size - 1, 0], ranks[::-1][:4], [*ranks[1:], 0][:3], [0, 1]]
    return found if size < 4 else [*found, [3, 1, 0], [2, 3], [1, 2]]


def sums_of(members: Sequence[int], length: int, dtype: torch.dtype) -> list[Tensor]:
    """Each member's part of the SUM: added from the next member round to itself, plainly."""
    size = len(members)
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    bounds = [k * length // size for k in range(size + 1)]
    parts = []
    for part in range(size):
        order = [members[(part + 1 + k) % size] for k in range(size)]
        first, *rest = [values(rank, length, dtype).to(wide) for rank in order]
        for one in rest:
            first = first + one
        parts.append(first.to(dtype)[bounds[part] : bounds[part + 1]])
    return parts


# Collectives of sub-groups


def collected(ranks: Collectives) -> dict[str, Tensor]:
    """In each sub-group in turn all collectives, with the same keys in all of them."""
    found: dict[str, Tensor] = {}
    made = ranks.subgroups(lists(ranks.size))
    for number, (members, part) in enumerate(zip(lists(ranks.size), made, strict=True)):
        assert (part is not None) == (ranks.rank in members)
        if part is not None:
            assert (part.rank, part.size) == (members.index(ranks.rank), len(members))
            found |= {f"{number} {name}": one for name, one in _in_one(part, ranks.rank)}
    whole = values(ranks.rank, 1_003)
    ranks.all_reduce(key(0), whole).wait()  # a key of theirs, too
    inner = next((one for one in made if one is not None and one.size == ranks.size), None)
    for part in inner.subgroups([[inner.size - 1, 0]]) if inner is not None else ():
        if part is not None:
            found |= {f"inner {name}": one for name, one in _in_one(part, ranks.rank)}
    return found | {"whole": whole}


def _in_one(part: Collectives, rank: int) -> Iterator[tuple[str, Tensor]]:
    for unit, dtype in enumerate(DTYPES):
        for micro, length in enumerate(LENGTHS):
            about = {"unit": unit, "micro": micro}
            own, span = values(rank, length, dtype), schedule.cut(length, part.size)[part.rank]
            part.all_reduce(key(0, **about), own).wait()
            yield f"sum {dtype} {length}", own
            out = torch.zeros(len(span), dtype=dtype)
            part.reduce_scatter(key(1, **about), values(rank, length, dtype), out).wait()
            yield f"part {dtype} {length}", out
    gathered = torch.zeros(1_003)
    span = schedule.cut(1_003, part.size)[part.rank]
    part.all_gather(key(2), span.of(values(9, 1_003)).clone(), gathered).wait()
    yield "gathered", gathered
    told = values(rank, 1_003)
    part.broadcast(key(3), told, source=part.size - 1).wait()
    yield "broadcast", told
    said = part.all_gather_bytes(key(4), NAMES[rank], limit=3_000)
    yield "said", torch.tensor([len(one) for one in said])
    part.barrier(key(5)).wait()


def wanted(size: int, rank: int) -> dict[str, Tensor]:
    """What `collected` must give, by plain additions."""
    found: dict[str, Tensor] = {}
    for number, members in enumerate(lists(size)):
        if rank in members:
            found |= {f"{number} {name}": one for name, one in _of_one(members, rank)}
    turned = next((one for one in lists(size) if len(one) == size), None)
    if turned is not None and rank in (turned[-1], turned[0]):
        found |= {f"inner {name}": one for name, one in _of_one([turned[-1], turned[0]], rank)}
    return found | {"whole": torch.cat(sums_of(range(size), 1_003, torch.float32))}


def _of_one(members: Sequence[int], rank: int) -> Iterator[tuple[str, Tensor]]:
    for dtype in DTYPES:
        for length in LENGTHS:
            parts = sums_of(members, length, dtype)
            yield f"sum {dtype} {length}", torch.cat(parts)
            yield f"part {dtype} {length}", parts[members.index(rank)]
    yield "gathered", values(9, 1_003)
    yield "broadcast", values(members[-1], 1_003)
    yield "said", torch.tensor([len(NAMES[one]) for one in members])


# Sends


def sent(ranks: Collectives) -> dict[str, Tensor]:
    """Between each two ranks in both directions, in the group and in one of the ranks turned round.

    The same keys and sizes in both.
    """
    [turned] = ranks.subgroups([range(ranks.size)[::-1]])
    assert turned is not None
    found: dict[str, Tensor] = {}
    for low, high in combinations(range(ranks.size), 2):
        for name, part in (("group", ranks), ("turned", turned)):
            for sender, to in ((low, high), (high, low)):
                for unit, dtype in enumerate(DTYPES):
                    for micro, length in enumerate(LENGTHS):
                        about = key(6, unit=unit, micro=micro)
                        if part.rank == sender:
                            told = _told(name, sender, to, length, dtype)
                            part.send(about, told, to=to).wait()
                        elif part.rank == to:
                            out = torch.full((length,), -7, dtype=dtype)
                            part.receive(about, out, source=sender).wait()
                            found[f"{name} {sender} {dtype} {length}"] = out
    return found


def came(size: int, rank: int) -> dict[str, Tensor]:
    """What `sent` must give."""
    own = {"group": rank, "turned": size - 1 - rank}
    return {
        f"{name} {sender} {dtype} {length}": _told(name, sender, to, length, dtype)
        for name, to in own.items()
        for sender in range(size)
        if sender != to
        for dtype in DTYPES
        for length in LENGTHS
    }


def _told(name: str, sender: int, to: int, length: int, dtype: torch.dtype) -> Tensor:
    return values(10 * sender + to + 100 * len(name), length, dtype)
