"""The mean and the overlap of a tile in compiled loops; `update` and `overlap` have both in numpy.

Chunk by chunk, so that what is added to stays in the nearest cache. Nothing checks bounds: the
places were checked when they were taken from their bytes.
"""

import numpy as np

from atoll.codecs.topk.chunks import ABOVE, CHUNK, NEGATIVE, ROW
from atoll.codecs.topk.magnitudes import VALUES
from atoll.compiled.arrays import FLOATS, INTEGERS, Bytes, Floats, Integers, Places
from atoll.compiled.jit import loop

# Examples of what a loop is called with: a row for each peer.
_TABLE: Integers = np.empty((0, 0), np.int64)
_INDICES: Places = np.empty((0, 0), np.int32)
_CODES: Bytes = np.empty((0, 0), np.uint8)
_MAGNITUDES: Bytes = np.empty((0, 0, 0), np.uint8)
_FACTORS: Floats = np.empty((0, 0), np.float32)

_KEPT = CHUNK // ROW
_WORDS = CHUNK // 64
_U = np.uint64
_ZERO, _ONE, _ALL = _U(0), _U(1), _U(0xFFFFFFFFFFFFFFFF)
_PAIRS, _FOURS, _EIGHTS = _U(0x5555555555555555), _U(0x3333333333333333), _U(0x0F0F0F0F0F0F0F0F)
_SUM = _U(0x0101010101010101)


@loop(_INDICES, _CODES, _MAGNITUDES, _FACTORS, INTEGERS, FLOATS, INTEGERS, FLOATS, INTEGERS)
def mean(
    indices: Places,
    codes: Bytes,
    magnitudes: Bytes,
    factors: Floats,
    stops: Integers,
    shares: Floats,
    weights: Integers,
    out: Floats,
    counts: Integers,
) -> None:
    """`update.mean_tile`; `out` and `counts` [n] are zeros, `shares` are `weights` as fp32."""
    segment = 0
    for chunk in range(magnitudes.shape[1]):
        start = chunk * CHUNK
        stop = min(start + CHUNK, out.size)
        while stops[segment] <= start:
            segment += 1
        for peer in range(indices.shape[0]):
            at = segment
            for k in range(chunk * _KEPT, min(chunk * _KEPT + _KEPT, indices.shape[1])):
                place = indices[peer, k]
                while stops[at] <= place:
                    at += 1
                code = codes[peer, k]
                size = VALUES[magnitudes[peer, chunk, code & ABOVE]]
                value = -size if code & NEGATIVE else size
                out[place] += (value * factors[peer, at]) * shares[peer]
                counts[place] += weights[peer]
        for i in range(start, stop):
            if counts[i]:
                out[i] = out[i] / np.float32(counts[i])


@loop()
def _ones(word: np.uint64) -> np.int64:
    """How many bits are set."""
    word = word - ((word >> _ONE) & _PAIRS)
    word = (word & _FOURS) + ((word >> _U(2)) & _FOURS)
    word = (word + (word >> _U(4))) & _EIGHTS
    return np.int64((word * _SUM) >> _U(56))


@loop(_INDICES, _CODES, _TABLE, _TABLE)
def overlap(indices: Places, codes: Bytes, shared: Integers, equal: Integers) -> None:
    """`overlap.PairCounts.add`: adds to both tables [peers, peers] above their diagonals."""
    peers, kept = indices.shape
    bits = np.empty((peers, 3, _WORDS), np.uint64)  # sent; code & 1; code & 2
    for first in range(0, kept, _KEPT):
        base = first // _KEPT * CHUNK
        bits[:] = _ZERO
        for peer in range(peers):
            for k in range(first, min(first + _KEPT, kept)):
                place = indices[peer, k] - base
                bit = _ONE << _U(place % 64)
                bits[peer, 0, place // 64] |= bit
                if codes[peer, k] & ABOVE:
                    bits[peer, 1, place // 64] |= bit
                if codes[peer, k] & NEGATIVE:
                    bits[peer, 2, place // 64] |= bit
        for one in range(peers):
            for other in range(one + 1, peers):
                found, alike = np.int64(0), np.int64(0)
                for word in range(_WORDS):
                    both = bits[one, 0, word] & bits[other, 0, word]
                    # No branch: vectors count 8 words at once, and copies take no longer.
                    differ = bits[one, 1, word] ^ bits[other, 1, word]
                    differ |= bits[one, 2, word] ^ bits[other, 2, word]
                    found += _ones(both)
                    alike += _ones(both & (differ ^ _ALL))
                shared[one, other] += found
                equal[one, other] += alike
