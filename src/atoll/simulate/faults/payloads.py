"""The codecs once more, in plain numpy from `docs/wire-format.md`: bytes of values, and back.

Shares nothing with `atoll.codecs`. For the stand-in alone, whose finite values are fewer than a
group, and than a chunk of topk.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]
Settings = Mapping[str, Any]  # of one codec, as JSON

_MOST = {"int8": 127, "int4": 7}  # the largest level
_BITS = {"int8": 8, "int4": 4, "sign": 1}  # of a level
_ROW = 64  # of so many values topk keeps one


class Lane(NamedTuple):
    """Whose rounding by chance it is: "download", or "upload/" and a worker_id."""

    seed: int
    round: int
    name: str

    def bits(self, count: int) -> NDArray[np.uint16]:
        """Random 16 bits for each of the first values."""
        said = json.dumps([self.seed, self.round, self.name], separators=(",", ":"))
        words = np.frombuffer(hashlib.sha256(said.encode()).digest(), "<u8")
        drawn = np.random.Philox(key=words[:2], counter=0).random_raw(-(-count // 4))
        return drawn.astype("<u8").view(np.uint16)[:count]


def encode(values: Floats, settings: Settings, lane: Lane) -> bytes:
    """The payload of `values`."""
    name, size = settings["codec"], len(values)
    if name == "fp32":
        return values.astype("<f4").tobytes()
    draws = None
    if settings.get("rounding") == "stochastic":
        draws = lane.bits(size)
    if name == "bf16":
        return (_bf16(values, draws) >> np.uint32(16)).astype("<u2").tobytes()
    if name == "topk":
        return _encode_topk(values)
    blocks = _in_blocks(values, settings["block"])
    sizes = np.abs(blocks)
    if name == "sign":
        many = np.full(len(blocks), settings["block"])
        many[-1] = size - settings["block"] * (len(blocks) - 1)
        scales = (_sum(sizes.astype(np.float64)) / many).astype(np.float32)
        levels = (blocks < 0).astype(np.int64)
    else:
        scales = sizes.max(axis=1) / np.float32(_MOST[name])
        quotients = blocks / np.where(scales == 0, np.float32(1), scales)[:, None]
        if draws is None:
            rounded = np.round(quotients)
        else:
            added = draws.astype(np.float32) / np.float32(65536)
            rounded = np.floor(quotients + _in_blocks(added, settings["block"]))
        levels = np.clip(rounded, -_MOST[name], _MOST[name]).astype(np.int64)
    packed = _packed(levels.reshape(-1)[:size], _BITS[name])
    return bytes(scales.astype("<f4").tobytes()) + packed


def decode(payload: bytes, settings: Settings, size: int) -> Floats:
    """The values, so many, of a payload."""
    name = settings["codec"]
    if name == "fp32":
        return np.frombuffer(payload, "<f4").astype(np.float32)
    if name == "bf16":
        return (np.frombuffer(payload, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    if name == "topk":
        return _decode_topk(payload, size)
    cut = 4 * -(-size // settings["block"])
    scales = np.frombuffer(payload[:cut], "<f4").astype(np.float32)
    levels = _unpacked(payload[cut:], _BITS[name], size)
    if name == "sign":
        levels = 1 - 2 * levels
    else:
        half = 1 << (_BITS[name] - 1)
        levels = (levels ^ half) - half  # two's complement
    return levels.astype(np.float32) * np.repeat(scales, settings["block"])[:size]


def to_bf16(values: Floats) -> Floats:
    """The nearest values that bf16 has."""
    return _bf16(values, None).view(np.float32)


def _bf16(values: Floats, draws: NDArray[np.uint16] | None) -> NDArray[np.uint32]:
    bits = values.view(np.uint32)
    if draws is None:  # to nearest, ties to even
        added = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    else:
        added = draws.astype(np.uint32)
    return (bits + added) & np.uint32(0xFFFF0000)


def _in_blocks(values: Floats, block: int) -> Floats:
    return np.pad(values, (0, -len(values) % block)).reshape(-1, block)


def _sum(terms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of each row: the upper half is added to the lower until one number is left."""
    while terms.shape[1] > 1:
        half = terms.shape[1] // 2
        terms = terms[:, :half] + terms[:, half:]
    return terms[:, 0]


def _packed(numbers: Integers, width: int) -> bytes:
    """The lowest bits of each, so many, one number after the other from the lowest bit on."""
    return np.packbits((numbers[:, None] >> np.arange(width)) & 1, bitorder="little").tobytes()


def _unpacked(data: bytes, width: int, count: int) -> Integers:
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[: width * count]
    digits = bits.reshape(count, width).astype(np.int64) << np.arange(width)
    numbers: Integers = digits.sum(axis=1)
    return numbers


# The largest of 64


def _encode_topk(values: Floats) -> bytes:
    kept = -(-len(values) // _ROW)
    by_size = sorted(range(len(values)), key=lambda place: (-abs(values[place]), place))
    places = np.array(sorted(by_size[:kept]))
    sent = values[places].astype(np.float64)
    sizes = np.abs(sent)
    above = sizes > _mean(sizes)
    high = np.zeros(2 * kept, np.int64)
    high[places // _ROW + np.arange(kept)] = 1
    codes = [_code(_mean(sizes[~above])), _code(_mean(sizes[above])) if above.any() else 0]
    parts = ((places % _ROW, 6), (high, 1), (above + 2 * (sent < 0), 2))
    return b"".join(_packed(numbers, width) for numbers, width in parts) + bytes(codes)


class Sent(NamedTuple):
    """What a topk payload says: places, ascending, and for each which magnitude and which sign."""

    places: Integers
    larger: Integers  # 1: the second magnitude
    below: Integers  # not 0: a value below 0
    magnitudes: tuple[float, float]

    def values(self) -> Floats:
        sizes = np.array(self.magnitudes)[self.larger]
        return np.where(self.below, -sizes, sizes).astype(np.float32)


def sent(payload: bytes, size: int) -> Sent:
    """What a topk payload of so many values says."""
    kept = -(-size // _ROW)
    low, wide = -(-6 * kept // 8), -(-2 * kept // 8)
    high = np.flatnonzero(_unpacked(payload[low : low + wide], 1, 2 * kept))
    places = (high - np.arange(kept)) * _ROW + _unpacked(payload[:low], 6, kept)
    told = _unpacked(payload[low + wide : -2], 2, kept)
    first, second = (_magnitude(code) for code in payload[-2:])
    return Sent(places, told & 1, told & 2, (first, second))


def _decode_topk(payload: bytes, size: int) -> Floats:
    found = sent(payload, size)
    values = np.zeros(size, np.float32)
    values[found.places] = found.values()
    return values


def _mean(sizes: NDArray[np.float64]) -> float:
    filled = np.zeros((1, _ROW))
    filled[0, : len(sizes)] = sizes
    return float(_sum(filled)[0] / len(sizes))


def _magnitude(code: int) -> float:
    """What a byte stands for."""
    if code <= 1:
        return 2.0**-149 if code else 0.0
    if code <= 14:
        return float(2.0 ** (-139 + 9 * (code - 2)))
    if code <= 238:
        octave, eighth = divmod(code - 15, 8)
        return float((8 + eighth) / 8 * 2.0 ** (octave - 22))
    return float(2.0 ** (6 + 9 * (code - 239)))


def _code(mean: float) -> int:
    """Down, and between two fine steps to the nearer one, the larger of two as near."""
    below = max(code for code in range(253) if _magnitude(code) <= mean)
    is_fine = 15 <= below < 238
    middle = (_magnitude(below) + _magnitude(below + 1)) / 2
    return below + 1 if is_fine and mean >= middle else below
