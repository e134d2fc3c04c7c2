"""The topk codec's chunks in compiled loops; `chunks` has the same in numpy, and the format."""

import numpy as np

from atoll.codecs import pieces
from atoll.codecs.topk.chunks import (
    ABOVE,
    CHUNK,
    COUNT,
    MAGNITUDES,
    NEGATIVE,
    ORDER,
    RANGE,
    ROW,
    STRAY,
)
from atoll.codecs.topk.magnitudes import LARGEST, NOT_FINITE, VALUES, code
from atoll.codecs.tree import halve
from atoll.compiled.arrays import BYTES, INTEGER, Bytes, Doubles, Floats
from atoll.compiled.bits import INFINITY_BITS, largest_bits
from atoll.compiled.jit import loop

_I = np.int32
_MAGNITUDE = _I(0x7FFFFFFF)
_ZERO = np.float32(0.0)


@loop()
def num_kept(elements: int) -> int:
    """How many values a chunk keeps."""
    return (elements + ROW - 1) // ROW


@loop()
def _part_bytes(kept: int) -> tuple[int, int]:
    """Bytes of the low bits; of the high bits, and as many of the values."""
    return (kept * 6 + 7) // 8, (kept * 2 + 7) // 8


@loop()
def body_bytes(elements: int) -> int:
    """The bytes of a chunk."""
    low, other = _part_bytes(num_kept(elements))
    return low + 2 * other + 2


@loop()
def parts(body: Bytes, elements: int) -> tuple[Bytes, Bytes, Bytes, Bytes]:
    """Low bits, high bits, values and the two codes of a chunk, as views."""
    low, other = _part_bytes(num_kept(elements))
    values = low + other
    codes = values + other
    return body[:low], body[low:values], body[values:codes], body[codes : codes + 2]


@loop()
def _put(bits: Bytes, first: int, number: int, width: int) -> None:
    """Sets the bits of `number`, which are 0, from bit `first` on."""
    for i in range(width):
        bits[(first + i) // 8] |= np.uint8((number >> i & 1) << (first + i) % 8)


@loop()
def get(bits: Bytes, first: int, width: int) -> int:
    """The number of `width` bits from bit `first` on."""
    number = 0
    for i in range(width):
        number |= (int(bits[(first + i) // 8]) >> (first + i) % 8 & 1) << i
    return number


@loop()
def _smallest_kept(values: Floats, kept: int) -> np.int32:
    """The bits of the smallest magnitude that is kept: the `kept`-th largest of `values`.

    Found by halving the range of bit patterns: each step is one count, which vectors do fast.
    """
    bits = values.view(np.int32)
    low, high = _I(0), largest_bits(values)  # at least `kept` are `low` or larger
    while low < high:
        middle = _I(high - _I(_I(high - low) >> _I(1)))  # above `low`, so the range shrinks
        count = _I(0)
        for i in range(bits.size):
            count += _I(1) if _I(bits[i] & _MAGNITUDE) >= middle else _I(0)
        if count >= kept:
            low = middle
        else:
            high = _I(middle - _I(1))
    return low


@loop()
def _keep(values: Floats, low: Bytes, high: Bytes, signs: Bytes, sizes: Doubles) -> bool:
    """Writes places and signs of the largest, and their `sizes`; False where one is not finite."""
    bits = values.view(np.int32)
    kept = num_kept(values.size)
    least = _smallest_kept(values, kept)
    ties = kept  # of those as small as `least` the first ones are kept, as many as there is room
    for i in range(bits.size):
        ties -= 1 if _I(bits[i] & _MAGNITUDE) > least else 0
    is_sound, found = True, 0
    for i in range(bits.size):
        magnitude = _I(bits[i] & _MAGNITUDE)
        if magnitude < least or (magnitude == least and ties == 0):
            continue
        ties -= 1 if magnitude == least else 0
        if magnitude >= INFINITY_BITS:
            is_sound = False
        sizes[found] = np.float64(abs(values[i]))
        _put(low, 6 * found, i % ROW, 6)
        _put(high, i // ROW + found, 1, 1)
        if values[i] < _ZERO:
            _put(signs, 2 * found, NEGATIVE, 2)
        found += 1
    return is_sound


@loop()
def _pack(values: Floats, _head: Bytes, body: Bytes) -> None:
    kept = num_kept(values.size)
    low, high, signs, codes = parts(body, values.size)
    body[:] = np.uint8(0)
    sizes = np.zeros(ROW, np.float64)
    if not _keep(values, low, high, signs, sizes):
        codes[0] = NOT_FINITE
        return
    mean = halve(sizes.copy()) / np.float64(kept)
    below, above, many = np.zeros(ROW, np.float64), np.zeros(ROW, np.float64), 0
    for i in range(kept):
        if sizes[i] > mean:
            above[i] = sizes[i]
            many += 1
            _put(signs, 2 * i, ABOVE, 2)
        else:
            below[i] = sizes[i]
    codes[0] = code(halve(below) / np.float64(kept - many))
    codes[1] = code(halve(above) / np.float64(max(many, 1)))


@loop()
def _unpack(_head: Bytes, body: Bytes, values: Floats) -> None:
    low, high, signs, codes = parts(body, values.size)
    values[:] = _ZERO
    found = 0
    for bit in range(8 * high.size):
        if not get(high, bit, 1):
            continue
        told = get(signs, 2 * found, 2)
        size = VALUES[codes[told & ABOVE]]
        place = (bit - found) * ROW + get(low, 6 * found, 6)
        values[place] = -size if told & NEGATIVE else size
        found += 1


@loop()
def _squares(_head: Bytes, body: Bytes, elements: int) -> float:
    kept = num_kept(elements)
    _, _, signs, codes = parts(body, elements)
    many = 0
    for i in range(kept):
        many += get(signs, 2 * i, 2) & ABOVE
    first, second = np.float64(VALUES[codes[0]]), np.float64(VALUES[codes[1]])
    return np.float64(kept - many) * (first * first) + np.float64(many) * (second * second)


@loop()
def _has_stray(bits: Bytes, used: int) -> bool:
    return used < 8 * bits.size and get(bits, used, 8 * bits.size - used) != 0


@loop()
def _fault(body: Bytes, elements: int) -> int:
    """What is wrong with one chunk, as `chunks.Chunks.faults` says it."""
    kept = num_kept(elements)
    low, high, signs, codes = parts(body, elements)
    if _has_stray(low, 6 * kept) or _has_stray(high, 2 * kept) or _has_stray(signs, 2 * kept):
        return STRAY
    count = 0
    for bit in range(2 * kept):
        count += get(high, bit, 1)
    if count != kept:
        return COUNT
    found, before, ascends, is_above = 0, -1, True, False
    for bit in range(2 * kept):
        if get(high, bit, 1):
            place = (bit - found) * ROW + get(low, 6 * found, 6)
            ascends = ascends and place > before
            is_above = is_above or get(signs, 2 * found, 2) & ABOVE == ABOVE
            before = max(before, place)
            found += 1
    if not ascends:
        return ORDER
    if before >= elements:
        return RANGE
    first, second = codes[0], codes[1]
    if is_above:
        return 0 if max(first, 1) <= second and second <= LARGEST else MAGNITUDES
    is_coded = first <= LARGEST or first == NOT_FINITE
    return 0 if is_coded and second == 0 else MAGNITUDES


@loop(BYTES, INTEGER)
def first_fault(payload: Bytes, elements: int) -> tuple[int, int]:
    """The first chunk with a fault, and which; (0, 0) where there is none."""
    full = body_bytes(CHUNK)
    for chunk in range((elements + CHUNK - 1) // CHUNK):
        found = _fault(payload[chunk * full :], min(CHUNK, elements - chunk * CHUNK))
        if found:
            return chunk, found
    return 0, 0


LOOPS = pieces.loops_of(
    head_bytes=0, body_bytes=body_bytes, pack=_pack, unpack=_unpack, squares=_squares
)
