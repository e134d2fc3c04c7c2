"""int4, sign and stochastic int8 against references written out by hand, block by block."""

import math
from collections.abc import Iterator
from itertools import accumulate

import numpy as np
import pytest
import torch
from torch import Tensor

from atoll.codecs.blocks import Blocks
from atoll.codecs.int4.codec import Int4
from atoll.codecs.int8.codec import Int8
from atoll.codecs.noise import Noise
from atoll.codecs.scaled import Scaled
from atoll.codecs.sign.codec import Sign
from atoll.errors import ConfigError, FrameError
from atoll.layout import GROUP_ELEMENTS
from tests.contract.test_codecs import NOISE, encode, values_of

F = np.float32
LARGEST = torch.finfo(torch.float32).max
# More than a group, with a short last group, block, pair and byte.
RAGGED = GROUP_ELEMENTS + 331


def blocks_of(values: Tensor, block: int) -> Iterator[list[np.ndarray]]:
    """The blocks of every group."""
    for group in values.split(GROUP_ELEMENTS):
        yield [piece.numpy() for piece in group.split(block)]


def nibbles(levels: list[int]) -> bytes:
    filled = [*levels, 0] if len(levels) % 2 else levels
    pairs = zip(filled[0::2], filled[1::2], strict=True)
    return bytes((low % 16) | (high % 16) << 4 for low, high in pairs)


def bits(levels: list[int]) -> bytes:
    """The lowest bit of a byte first."""
    number = sum((level < 0) << i for i, level in enumerate(levels))
    return number.to_bytes(math.ceil(len(levels) / 8), "little")


def nearest_levels(piece: np.ndarray, most: int) -> tuple[np.float32, list[int]]:
    scale = np.abs(piece).max() / F(most)
    quotients = np.rint(piece / scale) if scale else np.zeros_like(piece)
    return scale, [int(q) for q in np.clip(quotients, -most, most)]


def int4_reference(values: Tensor, block: int) -> bytes:
    payload = b""
    for group in blocks_of(values, block):
        found = [nearest_levels(piece, 7) for piece in group]
        payload += b"".join(scale.astype("<f4").tobytes() for scale, _ in found)
        payload += nibbles([level for _, levels in found for level in levels])
    return payload


def special(size: int) -> Tensor:
    """Zeros, subnormal scales and huge values among ordinary ones."""
    values = values_of(size)
    values[:256] = 0.0
    values[256:512] *= 2.0**-140
    values[512:768] *= 2.0**110
    values[768:1024] = 2.0**-149
    values[1024:1280] = -0.0
    return values


@pytest.mark.parametrize("block", [16, 128, 4096])
@pytest.mark.parametrize("size", [1, 2, 127, 129, RAGGED])
def test_int4_payload_is_the_definition_block_by_block(block, size):
    values = special(RAGGED)[-size:]

    payload = encode(Int4(block=block), values)

    assert payload.numpy().tobytes() == int4_reference(values, block)


def test_int4_rounds_ties_to_even_and_packs_the_earlier_value_low():
    values = torch.tensor([7.0, 0.5, 1.5, 2.5, -0.5, -1.5, -7.0])  # scale 1

    payload = encode(Int4(), values)

    assert payload.numpy().tobytes().hex() == "0000803f" + "07" + "22" + "e0" + "09"


def test_int4_decodes_to_one_product_of_level_and_scale():
    values = special(RAGGED)
    payload = encode(Int4(), values)

    decoded = Int4().decode(payload, RAGGED).numpy()

    found = [nearest_levels(p, 7) for group in blocks_of(values, 128) for p in group]
    expected = np.concatenate([np.array(levels, F) * scale for scale, levels in found])
    assert np.array_equal(decoded, expected)


@pytest.mark.parametrize("codec", [Int4(), Int8()], ids=["int4", "int8"])
def test_largest_values_stay_finite_and_exact(codec):
    values = torch.tensor([LARGEST, -LARGEST] * 150)

    decoded = codec.decode(encode(codec, values), 300)

    assert torch.isfinite(decoded).all()
    assert torch.allclose(decoded, values, rtol=2.0**-22)


def test_int4_of_the_largest_scale_is_the_fp32_maximum():
    assert F(Int4.max_scale) * F(7) == F(LARGEST)
    with np.errstate(over="ignore"):
        assert np.nextafter(F(Int4.max_scale), F(np.inf)) * F(7) == np.inf


# --- sign ---


def halved(terms: list[float]) -> float:
    while len(terms) > 1:
        half = len(terms) // 2
        terms = [a + b for a, b in zip(terms[:half], terms[half:], strict=True)]
    return terms[0]


def sign_reference(values: Tensor, block: int) -> bytes:
    payload = b""
    for group in blocks_of(values, block):
        for piece in group:
            sizes = [abs(v) for v in piece.tolist()]
            mean = halved(sizes + [0.0] * (block - len(sizes))) / len(sizes)
            payload += np.array(mean).astype("<f4").tobytes()
        payload += bits([-1 if v < 0 else 1 for piece in group for v in piece.tolist()])
    return payload


@pytest.mark.parametrize("block", [16, 256, 4096])
@pytest.mark.parametrize("size", [1, 9, 255, 257, RAGGED])
def test_sign_payload_is_the_definition_block_by_block(block, size):
    values = special(RAGGED)[-size:]

    payload = encode(Sign(block=block), values)

    assert payload.numpy().tobytes() == sign_reference(values, block)


def test_sign_decodes_to_the_mean_with_the_sign():
    decoded = Sign().decode(encode(Sign(), torch.tensor([3.0, -1.0, 0.0, -0.0])), 4)

    assert decoded.tolist() == [1.0, -1.0, 1.0, 1.0]


def test_sign_of_the_largest_values_is_exact():
    values = torch.tensor([LARGEST, -LARGEST] * 128)

    assert torch.equal(Sign().decode(encode(Sign(), values), 256), values)


def test_sign_takes_zeros_of_both_kinds_for_the_same():
    positive, negative = (torch.full((300,), zero) for zero in (0.0, -0.0))

    assert torch.equal(encode(Sign(), positive), encode(Sign(), negative))


def test_mean_would_differ_with_a_library_sum():
    """The control: torch's mean has other bits."""
    values = values_of(GROUP_ELEMENTS)
    blocks = values.view(-1, 256).abs()

    scales = encode(Sign(), values)[:1024].view(torch.float32)

    assert not torch.equal(scales, blocks.mean(dim=1))


def test_sums_from_the_left_are_others_than_the_trees():
    terms = [2.0**60] + [2.0**7 + 1] * 255

    *_, from_the_left = accumulate(terms)

    assert halved(terms) != from_the_left


# --- what is not finite, what is not there ---


@pytest.mark.parametrize("codec", [Int4(), Sign(), Int4(rounding="stochastic")], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_damaged_block_is_nan_whole_and_its_neighbours_are_as_always(codec: Blocks, bad):
    values = values_of(1024)
    damaged = values.clone()
    damaged[300] = bad

    decoded = codec.decode(encode(codec, damaged), 1024)

    first = 300 // codec.block * codec.block
    hit = slice(first, first + codec.block)
    expected = codec.decode(encode(codec, values), 1024)
    expected[hit] = torch.nan
    assert torch.equal(decoded.isnan(), expected.isnan())
    assert torch.equal(decoded.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize(
    ("codec", "elements", "stray"),
    [(Int4(), 5, 0x10), (Int4(), 5, 0x80), (Sign(), 5, 0x20), (Sign(), 15, 0x80)],
    ids=str,
)
def test_bits_behind_the_last_value_are_refused(codec, elements, stray):
    payload = encode(codec, values_of(elements)).clone()
    codec.decode(payload, elements)
    payload[-1] |= stray

    with pytest.raises(FrameError, match=r"bits are used; the others must be 0"):
        codec.decode(payload, elements)


# --- stochastic rounding ---

STOCHASTIC: list[Scaled] = [Int8(rounding="stochastic"), Int4(rounding="stochastic")]
every_stochastic = pytest.mark.parametrize("codec", STOCHASTIC, ids=lambda codec: codec.format)


def stochastic_reference(codec: Scaled, values: Tensor, first_group: int) -> bytes:
    """By the definition: floor(x / scale + u), u of the value's group and place."""
    most, payload = int(codec.most), b""
    for index, group in enumerate(blocks_of(values, codec.block)):
        u = NOISE.bits16(first_group + index, sum(map(len, group))).astype(F) / F(65536)
        scales, levels = b"", []
        for number, piece in enumerate(group):
            scale = np.abs(piece).max() / F(most)
            draws = u[number * codec.block :][: len(piece)]
            quotients = np.floor(piece / scale + draws) if scale else np.zeros_like(piece)
            scales += scale.astype("<f4").tobytes()
            levels += [int(q) for q in np.clip(quotients, -most, most)]
        payload += scales + PACKED[codec.name](levels)
    return payload


PACKED = {"int4": nibbles, "int8": lambda levels: np.array(levels, np.int8).tobytes()}


@every_stochastic
def test_stochastic_payload_is_the_definition(codec):
    values = special(RAGGED)

    payload = encode(codec, values, first_group=5)

    assert payload.numpy().tobytes() == stochastic_reference(codec, values, 5)


@pytest.mark.parametrize("sign", [1, -1], ids=["above", "below"])
@every_stochastic
def test_largest_value_is_never_rounded_to_a_level_that_is_not_there(codec, sign):
    """Its quotient may be one fp32 beyond the last level, and a draw just below 1, or 0."""
    candidates = np.linspace(1, 2, 2000, dtype=F)
    quotients = candidates / (candidates / F(codec.most))
    worst = candidates[quotients > codec.most][0]
    values = torch.full((2 * GROUP_ELEMENTS,), sign * float(worst))
    draws = np.concatenate([NOISE.bits16(group, GROUP_ELEMENTS) for group in (0, 1)])
    assert (draws.min(), draws.max()) == (0, 65535)

    decoded = codec.decode(encode(codec, values), values.numel())

    assert torch.allclose(decoded, values, rtol=2.0**-22)


class NoChance(Noise):
    """Draws zeros: what is drawn for one value of 65,536."""

    def bits16(self, group: int, count: int) -> np.ndarray:
        return np.zeros(count, np.uint16)


@pytest.mark.parametrize("codec", [Int8(32, "stochastic"), Int4(32, "stochastic")], ids=str)
def test_largest_value_is_never_rounded_down_to_a_level_that_is_not_there(codec):
    """Its quotient may be one fp32 below the first level, and the draw 0."""
    drawn = np.random.default_rng(0).random(1000).astype(F)
    beyond = [x for x in drawn if x / (x / F(codec.most)) > F(codec.most)]
    values = torch.tensor([[-x, *[0.0] * 31] for x in beyond]).flatten()

    payload = codec.encode(values, noise=NoChance(0, 1, "download"), first_group=0)

    arrived = codec.decode(payload, len(values))[::32].numpy()
    assert len(beyond) > 50
    assert np.abs(arrived + np.array(beyond)).max() < 1e-6


@every_stochastic
def test_block_too_small_for_a_scale_is_zeros_whatever_is_drawn(codec):
    """Below 0 and with a draw of 0 the level below would be -1."""
    values = torch.full((2 * GROUP_ELEMENTS,), -(2.0**-149))
    draws = np.concatenate([NOISE.bits16(group, GROUP_ELEMENTS) for group in (0, 1)])
    assert draws.min() == 0

    payload = encode(codec, values)

    assert not payload.any()


@every_stochastic
def test_stochastic_rounding_is_right_on_average(codec):
    values = torch.full((GROUP_ELEMENTS,), 0.3)
    values[:: codec.block] = codec.most  # scale 1 in every block

    decoded = codec.decode(encode(codec, values), GROUP_ELEMENTS)

    # Six standard deviations of the mean of n draws of a step of 1, and the draws' own 2^-16.
    inner = decoded[values != codec.most].double()
    assert abs(inner.mean() - 0.3) < 6 * (0.3 * 0.7 / inner.numel()) ** 0.5 + 2.0**-16
    assert set(inner.tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("codec", [Int8(), Int4()], ids=["int8", "int4"])
def test_nearest_rounding_is_not_right_on_average(codec):
    """The control of the test above."""
    values = torch.full((GROUP_ELEMENTS,), 0.3)
    values[:: codec.block] = codec.most

    decoded = codec.decode(encode(codec, values), GROUP_ELEMENTS)

    assert not decoded[values != codec.most].any()


@every_stochastic
def test_stochastic_rounding_keeps_what_a_level_is_exactly(codec):
    levels = torch.arange(-codec.most, codec.most + 1)
    values = levels.repeat(GROUP_ELEMENTS)[: 4 * codec.block]  # scale 1

    decoded = codec.decode(encode(codec, values), values.numel())

    assert torch.equal(decoded, values)


@every_stochastic
def test_stochastic_rounding_depends_on_round_and_group_alone(codec):
    values = values_of(GROUP_ELEMENTS)
    other_round = Noise(seed=NOISE.seed, round=NOISE.round + 1, lane=NOISE.lane)

    payload = encode(codec, values, first_group=3)

    assert torch.equal(payload, encode(codec, values, first_group=3))
    assert not torch.equal(payload, encode(codec, values, first_group=4))
    assert not torch.equal(payload, codec.encode(values, noise=other_round, first_group=3))


@every_stochastic
def test_stochastic_rounding_refuses_to_work_without_noise(codec):
    with pytest.raises(ConfigError, match=f"{codec.name} with rounding='stochastic'.* no noise"):
        codec.encode(torch.ones(3), noise=None, first_group=0)


@every_stochastic
def test_format_says_how_it_was_rounded(codec):
    """Frames of the two kinds do not pass for each other, and the older word stays."""
    nearest = type(codec)()

    assert codec.format == f"{nearest.format}_stochastic"
    assert nearest.format == f"{codec.name}_{codec.block}"
