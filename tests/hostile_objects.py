"""Thousands of objects and statements that no honest peer makes, drawn from a seed.

Most are made by a peer that means it: checksums, sizes and signatures are right for what is wrong
inside. Each is malformed by construction, or by `is_sound`, which reads chunks on its own.
"""

import hashlib
import json
import math
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from atoll.gather import statement as statements
from tests import gather_objects as objects
from tests.frames import framed
from tests.gather_objects import KEY, OTHER_KEY, SMALL, TRAILER_BYTES, stated, values_for

PAYLOAD = objects.payload_of(values_for(SMALL))
GOOD = objects.object_of(PAYLOAD)
HEADER = objects.header_of().to_json()
GOOD_DOCUMENT = statements.signed(stated(GOOD), KEY)
CHUNKS = [(0, 82, 4096), (82, len(PAYLOAD), SMALL.size - 4096)]  # start, stop, elements

# Values that have broken readers before.
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63 - 1, 2**63, 10**400, 0.0, -0.0, 1.5, 1e308),
    *("", "a", "x" * 5000, "\x00", "é", "\ud800", "../..", "A" * 64, "0" * 64, "island-1"),
    *([], {}, [[]], [1, 2, 3], [["w", "float32", [1]]], {"a": 1}, [["d" * 16, 0, 2**63]]),
]
RAW_ODD = [
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"1e999",
    b"01",
    b"1.0e0",
    b"'x'",
    b"[" * 3000,
    b"9" * 5000,
]


class Hostile(NamedTuple):
    """An object with the document that stands beside it."""

    kind: str
    document: bytes
    data: bytes


def of_meaning(kind: str, data: bytes, **changes: Any) -> Hostile:
    """By a peer that states and signs just what it sends."""
    return Hostile(kind, statements.signed(stated(data, **changes), KEY), data)


def is_sound(payload: bytes) -> bool:
    """Whether every chunk is one that an encoder may write, all finite and within the bound."""
    total = 0.0
    for start, stop, elements in CHUNKS:
        square = _square_of(payload[start:stop], elements)
        if square is None:
            return False
        total += square
    return math.sqrt(total) <= 1e18


def _square_of(data: bytes, elements: int) -> float | None:
    """The chunk's sum of squares by the format's text; None when it is no chunk."""
    kept = math.ceil(elements / 64)
    sizes = [math.ceil(bits * kept / 8) for bits in (6, 2, 2)]
    low, high, values = (
        int.from_bytes(data[sum(sizes[:i]) : sum(sizes[: i + 1])], "little") for i in range(3)
    )
    first, second = data[sum(sizes) :]
    if low >> 6 * kept or high >> 2 * kept or values >> 2 * kept:
        return None
    ones = [bit for bit in range(2 * kept) if high >> bit & 1]
    places = [(bit - i) * 64 + (low >> 6 * i & 63) for i, bit in enumerate(ones)]
    if len(ones) != kept or places != sorted(set(places)) or places[-1] >= elements:
        return None
    above = sum(values >> 2 * i & 1 for i in range(kept))
    if above and not max(first, 1) <= second <= 252:
        return None
    if not above and (second or first > 252):
        return None
    return (kept - above) * _magnitude(first) ** 2 + above * _magnitude(second) ** 2


def _magnitude(code: int) -> float:
    if code < 15:
        return [0.0, 2.0**-149, *(2.0**e for e in range(-139, -22, 9))][code]
    if code < 239:
        return (8 + (code - 15) % 8) / 8 * 2.0 ** ((code - 15) // 8 - 22)
    return 2.0 ** (6 + 9 * (code - 239))


# --- ways to do harm; each draws one, or None where what it drew happens to be well formed ---


def flipped(draw: random.Random, data: bytes, most: int) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.randint(1, most)):
        changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def damaged_on_the_way(draw: random.Random) -> Hostile | None:
    data = flipped(draw, GOOD, 3)
    return None if data == GOOD else Hostile("damaged", GOOD_DOCUMENT, data)


def chunks_with_flips(draw: random.Random) -> Hostile | None:
    payload = flipped(draw, PAYLOAD, 4)
    return None if is_sound(payload) else of_meaning("flips", objects.object_of(payload))


def chunks_of_noise(draw: random.Random) -> Hostile | None:
    start, stop, _ = draw.choice(CHUNKS)
    payload = PAYLOAD[:start] + draw.randbytes(stop - start) + PAYLOAD[stop:]
    return None if is_sound(payload) else of_meaning("noise", objects.object_of(payload))


def tables(draw: random.Random) -> Hostile | None:
    _, stop, _ = draw.choice(CHUNKS)
    codes = bytes(draw.choice((0, 1, 100, 244, 245, 252, 253, 254, 255)) for _ in range(2))
    payload = PAYLOAD[: stop - 2] + codes + PAYLOAD[stop:]
    return None if is_sound(payload) else of_meaning("tables", objects.object_of(payload))


# What a frame says of itself alone; of a run, its accept path compares them with the lease.
TOLD_BY_THE_SENDER = ("incarnation", "loss_sum", "ranges", "rows", "tokens", "weight")


def spelled(told: dict[str, Any]) -> bytes:
    return json.dumps(told, sort_keys=True, separators=(",", ":")).encode()


def may_be_sound(text: bytes) -> bool:
    """Whether a header differs from the good one at most in what the sender may tell or omit."""
    good = json.loads(HEADER)
    try:
        told = json.loads(text)
        is_spelled = spelled(told) == text and told.keys() == good.keys()
    except (ValueError, TypeError, AttributeError, RecursionError):
        return False
    free = {*TOLD_BY_THE_SENDER, *(["tensors"] if is_spelled and told["tensors"] is None else [])}
    return is_spelled and all(told[name] == good[name] for name in good.keys() - free)


def headed(kind: str, text: bytes) -> Hostile | None:
    if may_be_sound(text):
        return None
    data = framed(text, PAYLOAD)
    nbytes = min(len(data), len(PAYLOAD) + TRAILER_BYTES + 12 + 65_536)
    return of_meaning(kind, data, nbytes=nbytes)


def header_fields(draw: random.Random) -> Hostile | None:
    told = json.loads(HEADER)
    told[draw.choice(sorted(told))] = draw.choice(ODD)
    return headed("field", spelled(told))


def header_keys(draw: random.Random) -> Hostile | None:
    told = json.loads(HEADER)
    name = draw.choice(sorted(told.keys() - set(TOLD_BY_THE_SENDER)))
    if draw.random() < 0.5:
        told[f"{name}{draw.randrange(100)}"] = draw.choice(ODD)
    else:
        del told[name]
    return headed("keys", spelled(told))


def header_spelling(draw: random.Random) -> Hostile | None:
    at = draw.randrange(len(HEADER) + 1)
    what = draw.choice([b" ", b"\n", b"\x00", b"\xff", b"\xc3\xa9", b'"', b"}", b",", *RAW_ODD])
    text = HEADER[:at] + what + HEADER[at + draw.choice((0, len(what))) :]
    return headed("spelling", text)


def header_twice(draw: random.Random) -> Hostile | None:
    told = json.loads(HEADER)
    name = draw.choice(sorted(told))
    pair = json.dumps({name: draw.choice([told[name], draw.choice(ODD)])})[1:-1].encode()
    return headed("twice", HEADER[:-1] + b"," + pair + b"}")


def header_numbers(draw: random.Random) -> Hostile | None:
    told = json.loads(HEADER)
    name = draw.choice(sorted(told))
    before = spelled({name: told[name]})[1:-1]
    after = spelled({name: 0})[1:-2] + draw.choice(RAW_ODD)
    return headed("numbers", HEADER.replace(before, after))


def header_length(draw: random.Random) -> Hostile | None:
    length = draw.choice([0, 1, len(HEADER) - 1, len(HEADER) + 1, 65_536, 65_537, 2**32 - 1])
    data = objects.resealed(GOOD[:8] + length.to_bytes(4, "little") + GOOD[12:])
    return of_meaning("header length", data)


def shortened(draw: random.Random) -> Hostile:
    data = GOOD[: draw.randrange(len(GOOD))]
    honest = draw.random() < 0.5 and len(data) > 0
    return of_meaning("short", data) if honest else Hostile("short", GOOD_DOCUMENT, data)


def lengthened(draw: random.Random) -> Hostile:
    data = GOOD + draw.randbytes(draw.choice((1, 2, 31, 82, 5000)))
    if draw.random() < 0.5:
        return of_meaning("long", data if draw.random() < 0.5 else objects.resealed(data))
    return Hostile("long", GOOD_DOCUMENT, data)


def lying_sizes(draw: random.Random) -> Hostile | None:
    nbytes = draw.choice([1, len(GOOD) - 1, len(GOOD) + 1, len(GOOD) + 65_536, 2**63 - 1])
    return of_meaning("size", GOOD, nbytes=nbytes)


def other_statements(draw: random.Random) -> Hostile:
    """Replayed, of another peer, run or base; signed by the peer itself."""
    changes: dict[str, Any] = {
        "window": draw.randrange(3),
        "uid": f"island-{draw.randint(1, 99)}",
        "run_id": f"run-{draw.randint(2, 99)}",
        "manifest_sha256": draw.randbytes(32).hex(),
        "base_digest": draw.randbytes(32).hex(),
        "sha256": draw.randbytes(32).hex(),
    }
    names = draw.sample(sorted(changes), draw.randint(1, len(changes)))
    return of_meaning("other", GOOD, **{name: changes[name] for name in names})


def forged_statements(draw: random.Random) -> Hostile:
    """Signed by another key, or for another domain, or with a field changed afterwards."""
    right = stated(GOOD)
    way = draw.randrange(4)
    if way == 0:
        return Hostile("forged", statements.signed(right, OTHER_KEY), GOOD)
    told = json.loads(GOOD_DOCUMENT)
    if way == 1:
        told["signature"] = KEY.sign(right.message()[1:]).hex()
    elif way == 2:
        told["signature"] = flipped(draw, bytes.fromhex(told["signature"]), 2).hex()
    else:
        name = draw.choice(sorted(told["statement"]))
        told["statement"][name] = draw.choice([*ODD, draw.randbytes(32).hex()])
    text = json.dumps(told, sort_keys=True, separators=(",", ":")).encode()
    return Hostile("forged", text, GOOD if text != GOOD_DOCUMENT else GOOD[:-1])


def damaged_statements(draw: random.Random) -> Hostile:
    way = draw.randrange(3)
    if way == 0:
        return Hostile("statement", GOOD_DOCUMENT[: draw.randrange(len(GOOD_DOCUMENT))], GOOD)
    if way == 1:
        at = draw.randrange(len(GOOD_DOCUMENT))
        what = draw.choice([b" ", b"\xff", b"\x00", b'"', b" " * 5000, *RAW_ODD])
        return Hostile("statement", GOOD_DOCUMENT[:at] + what + GOOD_DOCUMENT[at:], GOOD)
    text = flipped(draw, GOOD_DOCUMENT, 3)
    return Hostile("statement", text, GOOD if text != GOOD_DOCUMENT else b"")


def swapped(draw: random.Random) -> Hostile:
    """A good frame that the statement does not name; of the same peer, or another's."""
    header = {"loss_sum": draw.random()} if draw.random() < 0.5 else {"worker_id": "island-7"}
    data = objects.object_of(PAYLOAD, **header)
    if draw.random() < 0.5 and "worker_id" in header:
        return of_meaning("swapped", data)  # another's frame, taken over and signed anew
    return Hostile("swapped", GOOD_DOCUMENT, data)


WAYS: list[tuple[int, Callable[[random.Random], Hostile | None]]] = [
    *((2, way) for way in (damaged_on_the_way, chunks_with_flips, chunks_of_noise, tables)),
    *((2, way) for way in (header_fields, header_spelling, header_twice, header_numbers)),
    *((1, way) for way in (header_keys, header_length, shortened, lengthened, lying_sizes)),
    *((1, way) for way in (other_statements, forged_statements, damaged_statements, swapped)),
]


def drawn(count: int, *, seed: int) -> Iterator[Hostile]:
    """`count` malformed objects, no two alike."""
    draw = random.Random(seed)
    ways = [way for weight, way in WAYS for _ in range(weight)]
    seen: set[bytes] = set()
    while len(seen) < count:
        found = draw.choice(ways)(draw)
        if found is None:
            continue
        name = hashlib.sha256(found.document + b"\n" + found.data).digest()
        if name not in seen:
            seen.add(name)
            yield found
