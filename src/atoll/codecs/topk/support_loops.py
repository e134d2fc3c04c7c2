"""Sparse values of topk payloads in compiled loops; `support` has the same in numpy."""

import numpy as np

from atoll.codecs.topk.chunks import ABOVE, CHUNK, ROW
from atoll.codecs.topk.loops import body_bytes, get, num_kept, parts
from atoll.codecs.topk.support import SQUARES
from atoll.compiled.arrays import (
    BYTES,
    DOUBLES,
    INTEGER,
    INTEGERS,
    PLACES,
    Bytes,
    Doubles,
    Integers,
    Places,
)
from atoll.compiled.jit import loop


@loop(BYTES, INTEGER, PLACES, BYTES)
def write(payload: Bytes, elements: int, indices: Places, codes: Bytes) -> None:
    """Writes the places and codes of all values that a payload without a fault sends."""
    full, found = body_bytes(CHUNK), 0
    for first in range(0, elements, CHUNK):
        size = min(CHUNK, elements - first)
        low, high, values, _ = parts(payload[first // CHUNK * full :], size)
        before = found
        for bit in range(8 * high.size):
            if get(high, bit, 1):
                kept = found - before
                indices[found] = first + (bit - kept) * ROW + get(low, 6 * kept, 6)
                codes[found] = get(values, 2 * kept, 2)
                found += 1


@loop()
def _add(squares: Doubles, part: int, magnitudes: Bytes, below: int, above: int) -> None:
    """Adds what one chunk sends in one part: the first magnitude's squares, then the second's."""
    squares[part] += np.float64(below) * SQUARES[magnitudes[0]]
    squares[part] += np.float64(above) * SQUARES[magnitudes[1]]


@loop()
def _add_parts(
    body: Bytes, size: int, first: int, part: int, ends: Integers, squares: Doubles
) -> None:
    """Adds a chunk that lies in several parts, of which `part` is the first."""
    low, high, values, magnitudes = parts(body, size)
    found, below, above = 0, 0, 0
    for bit in range(8 * high.size):
        if not get(high, bit, 1):
            continue
        place = first + (bit - found) * ROW + get(low, 6 * found, 6)
        while place >= ends[part]:
            _add(squares, part, magnitudes, below, above)
            part, below, above = part + 1, 0, 0
        if get(values, 2 * found, 2) & ABOVE:
            above += 1
        else:
            below += 1
        found += 1
    _add(squares, part, magnitudes, below, above)


@loop(BYTES, INTEGER, INTEGER, INTEGERS, DOUBLES)
def add_squares(
    payload: Bytes, elements: int, first: int, ends: Integers, squares: Doubles
) -> None:
    """Adds the squares of a payload without a fault, chunk by chunk; see `TopK.add_squares`."""
    full, part = body_bytes(CHUNK), 0
    for start in range(0, elements, CHUNK):
        size = min(CHUNK, elements - start)
        while first + start >= ends[part]:
            part += 1
        body = payload[start // CHUNK * full :]
        if first + start + size > ends[part]:
            _add_parts(body, size, first + start, part, ends, squares)
            continue
        kept, above = num_kept(size), 0
        _, _, values, magnitudes = parts(body, size)
        for i in range(kept):
            above += get(values, 2 * i, 2) & ABOVE
        _add(squares, part, magnitudes, kept - above, above)
