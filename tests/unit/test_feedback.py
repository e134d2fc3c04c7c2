import math
from functools import partial

import numpy as np
import pytest
import torch

from atoll.codecs import feedback, finite
from atoll.codecs.bf16.codec import Bf16
from atoll.codecs.fp32.codec import Fp32
from atoll.codecs.int4.codec import Int4
from atoll.codecs.int8.codec import Int8
from atoll.codecs.noise import Noise
from atoll.codecs.sign.codec import Sign
from atoll.codecs.topk.codec import TopK
from atoll.errors import ConfigError
from atoll.layout import GROUP_ELEMENTS

FINE = [
    Bf16(),
    Bf16(rounding="stochastic"),
    Int8(),
]
LOSSY = [*FINE, Int8(rounding="stochastic"), Int4(), Int4(rounding="stochastic"), Sign(), TopK()]
every_lossy = pytest.mark.parametrize("codec", LOSSY, ids=lambda c: c.format)
ROUNDS = 64


def values_of(size: int, *, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(size, dtype=np.float32))


def noise_of(round_number: int) -> Noise:
    return Noise(seed=5, round=round_number, lane="a")


@every_lossy
def test_feedback_encodes_values_plus_residual_and_keeps_what_was_dropped(codec):
    values = values_of(1000)
    before = (values_of(1000, seed=1) * 0.01).bfloat16()
    residual = before.clone()

    payload = feedback.encode_with_feedback(
        codec, values, residual, noise=noise_of(1), first_group=2
    )

    wanted = values + before.float()
    expected = codec.encode(wanted, noise=noise_of(1), first_group=2)
    dropped = wanted - codec.decode(expected, 1000)
    assert torch.equal(payload, expected)
    assert torch.equal(residual, dropped.bfloat16())


@every_lossy
def test_feedback_gives_the_same_bytes_and_residuals_for_any_tile_of_whole_groups(codec):
    size = 2 * GROUP_ELEMENTS + 333
    values = values_of(size)
    whole = (values_of(size, seed=1) * 0.01).bfloat16()
    tiled = whole.clone()

    payload = feedback.encode_with_feedback(codec, values, whole, noise=noise_of(1), first_group=0)
    pieces = [
        feedback.encode_with_feedback(codec, v, r, noise=noise_of(1), first_group=group)
        for group, (v, r) in enumerate(
            zip(values.split(GROUP_ELEMENTS), tiled.split(GROUP_ELEMENTS), strict=True)
        )
    ]

    assert torch.equal(torch.cat(pieces), payload)
    assert torch.equal(tiled, whole)


@every_lossy
def test_feedback_never_writes_the_values(codec):
    values = values_of(1000)
    residual = feedback.new_residual(codec, 1000)

    feedback.encode_with_feedback(codec, values, residual, noise=noise_of(1), first_group=0)

    assert torch.equal(values, values_of(1000))


@every_lossy
def test_feedback_writes_into_given_memory(codec):
    values = values_of(1000)
    room = torch.empty(codec.encoded_bytes(1000), dtype=torch.uint8)
    residuals = [feedback.new_residual(codec, 1000) for _ in range(2)]

    returned = feedback.encode_with_feedback(
        codec, values, residuals[0], noise=noise_of(1), first_group=0, out=room
    )

    expected = feedback.encode_with_feedback(
        codec, values, residuals[1], noise=noise_of(1), first_group=0
    )
    assert returned is room
    assert torch.equal(room, expected)


def drift(codec, *, fed_back: bool) -> float:
    """How far the decoded sum is from the true sum after many rounds of the same small values."""
    # One large value sets the scale, so that the small ones round away without feedback.
    values = torch.full((256,), 1.0 + 2.0**-9 * 0.9)
    values[0] = 127.0 * 4
    residual = feedback.new_residual(codec, 256)
    total = torch.zeros(256, dtype=torch.float64)
    for number in range(ROUNDS):
        noise = noise_of(number)
        if fed_back:
            payload = feedback.encode_with_feedback(
                codec, values, residual, noise=noise, first_group=0
            )
        else:
            payload = codec.encode(values, noise=noise, first_group=0)
        total += codec.decode(payload, 256).double()
    return float((total - ROUNDS * values.double())[1:].abs().max())


DETERMINISTIC = [Bf16(), Int8(), Int4(block=256)]
# What one encoding drops at most, plus what storing the residual in bf16 drops in each round.
STEP = {"bf16": 2.0**-7, "int8": 4.0, "int4": 508 / 7}


@pytest.mark.parametrize("codec", DETERMINISTIC, ids=lambda c: c.name)
def test_feedback_keeps_the_decoded_sum_at_the_true_sum(codec):
    step = STEP[codec.name]

    error = drift(codec, fed_back=True)

    assert error <= step / 2 + ROUNDS * step / 2 * 2.0**-9


@pytest.mark.parametrize("codec", DETERMINISTIC[:2], ids=lambda c: c.name)
def test_sum_drifts_without_feedback(codec):
    error = drift(codec, fed_back=False)

    assert error > 10 * STEP[codec.name]


# A residual that decays


@every_lossy
@pytest.mark.parametrize("decay", [0.95, 0.5])
def test_feedback_adds_the_decayed_residual_with_one_rounding_each(codec, decay):
    values = values_of(5000)
    before = values_of(5000, seed=1).bfloat16()
    residual = before.clone()

    payload = feedback.encode_with_feedback(
        codec, values, residual, noise=noise_of(1), first_group=2, decay=decay
    )

    kept = before.float().numpy() * np.float32(decay)
    wanted = torch.from_numpy(kept + values.numpy())
    expected = codec.encode(wanted, noise=noise_of(1), first_group=2)
    assert torch.equal(payload, expected)
    assert torch.equal(residual, (wanted - codec.decode(expected, 5000)).bfloat16())


@every_lossy
def test_decay_of_one_is_no_decay(codec):
    plain, undecayed = (values_of(5000, seed=1).bfloat16() for _ in range(2))

    encode = partial(
        feedback.encode_with_feedback, codec, values_of(5000), noise=noise_of(1), first_group=0
    )

    payload = encode(plain)

    assert torch.equal(encode(undecayed, decay=1.0), payload)
    assert torch.equal(plain, undecayed)


def slow_values() -> torch.Tensor:
    """So alike that each is sent about once in 64 rounds."""
    return values_of(4096).abs() * 0.01 + 0.1


def rounds_of_topk(decay: float) -> tuple[torch.Tensor, torch.Tensor]:
    """What arrived, and what is left, of the same displacement in many rounds."""
    values = slow_values()
    residual, arrived = torch.zeros(4096, dtype=torch.bfloat16), torch.zeros(4096)
    for number in range(150):
        payload = feedback.encode_with_feedback(
            TopK(), values, residual, noise=noise_of(number), first_group=0, decay=decay
        )
        arrived += TopK().decode(payload, 4096)
    return arrived / (150 * values), residual


def test_topk_sends_every_value_in_time():
    """Of 4096 only 64 go at once; the others wait in the residual and grow."""
    shares, _ = rounds_of_topk(1.0)

    assert shares.min() > 0.3
    assert 0.6 < shares.mean() < 1


def test_topk_forgets_with_decay():
    """The control: what waits longer than the residual lasts never arrives."""
    shares, residual = rounds_of_topk(0.5)

    assert (shares == 0).sum() > 1000
    # g + g/2 + g/4 and so on: 2 g, less what bf16 drops.
    waiting = slow_values()[shares == 0]
    assert torch.allclose(residual.float()[shares == 0], 2 * waiting, rtol=2.0**-6)


# The norm of what is left


def test_norm_of_a_residual_is_the_root_of_its_squares():
    residual = values_of(2 * GROUP_ELEMENTS + 333).bfloat16()

    norm = feedback.residual_norm(residual)

    assert norm == pytest.approx(math.sqrt(math.fsum(v * v for v in residual.tolist())), rel=1e-12)


def squares(group: torch.Tensor) -> float:
    """Upper half onto lower half, from 65536 terms on, in Python's floats."""
    terms: list[float] = [v * v for v in group.tolist()]
    terms += [0.0] * (GROUP_ELEMENTS - group.numel())
    while len(terms) > 1:
        half = len(terms) // 2
        terms = [a + b for a, b in zip(terms[:half], terms[half:], strict=True)]
    return terms[0]


def test_norm_of_a_residual_is_that_sum_in_that_order():
    """Its bits are the same everywhere; a short group takes nothing over from the one before."""
    spread = torch.exp2(torch.arange(GROUP_ELEMENTS + 333) % 60 - 30.0)
    residual = (values_of(GROUP_ELEMENTS + 333) * spread).bfloat16()

    norm = feedback.residual_norm(residual)

    first, last = (squares(group) for group in residual.split(GROUP_ELEMENTS))
    assert norm == math.sqrt(first + last)
    assert norm != math.sqrt(float(residual.double().square().sum()))  # the control: torch's order


def test_norm_of_nothing_is_zero_and_of_a_nan_is_nan():
    damaged = torch.zeros(10, dtype=torch.bfloat16)
    damaged[3] = torch.nan

    assert feedback.residual_norm(torch.zeros(0, dtype=torch.bfloat16)) == 0.0
    assert math.isnan(feedback.residual_norm(damaged))


@pytest.mark.parametrize("codec", FINE, ids=lambda c: c.format)
def test_residual_stays_bounded_over_many_rounds(codec):
    residual = torch.zeros(2560, dtype=torch.bfloat16)

    for number in range(ROUNDS):
        feedback.encode_with_feedback(
            codec, values_of(2560, seed=number), residual, noise=noise_of(number), first_group=0
        )

    # |v| stays below 8: a whole step of bf16 there is 2^-5, half a step of int8 is 8 / 254.
    assert residual.float().abs().max() <= 2.0**-5


def test_feedback_of_a_lossless_codec_is_a_plain_encode():
    codec = Fp32()
    values = values_of(1000)

    payload = feedback.encode_with_feedback(
        codec, values, feedback.new_residual(codec, 1000), noise=None, first_group=0
    )

    assert payload.data_ptr() == values.data_ptr()


def test_feedback_refuses_a_residual_for_a_lossless_codec():
    residual = torch.zeros(3, dtype=torch.bfloat16)

    with pytest.raises(ConfigError, match="'fp32' drops nothing but was given a residual"):
        feedback.encode_with_feedback(Fp32(), torch.zeros(3), residual, noise=None, first_group=0)


@every_lossy
def test_feedback_refuses_to_drop_without_a_residual(codec):
    with pytest.raises(ConfigError, match="was given no residual"):
        feedback.encode_with_feedback(codec, torch.zeros(3), None, noise=None, first_group=0)


def test_square_sum_is_the_sum_of_squares():
    values = values_of(GROUP_ELEMENTS + 300)

    total = finite.square_sum(values)

    expected = math.fsum(v * v for v in values.tolist())
    assert total == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e-13, 1e16, 1e19, 1e37])
def test_square_sum_of_values_whose_squares_leave_fp32(scale):
    """Squares of these underflow or overflow in fp32, alone or in their sum."""
    values = values_of(GROUP_ELEMENTS + 300) * scale

    expected = math.fsum(v * v for v in values.tolist())
    assert finite.square_sum(values) == pytest.approx(expected, rel=1e-5)


def test_square_sum_of_the_largest_values_is_finite():
    assert math.isfinite(finite.square_sum(torch.full((1000,), torch.finfo(torch.float32).max)))


@pytest.mark.parametrize("pattern", [0x7F800000, -0x800000, 0x7FC00000, 0x7F800001, -1])
@pytest.mark.parametrize("place", [0, 70_000, GROUP_ELEMENTS + 299 + GROUP_ELEMENTS])
def test_square_sum_is_not_finite_when_one_value_is_not(pattern, place):
    values = values_of(2 * GROUP_ELEMENTS + 300)
    values.view(torch.int32)[place] = pattern

    assert not math.isfinite(finite.square_sum(values))


def test_square_sum_ignores_what_an_earlier_group_left_behind():
    values = torch.zeros(GROUP_ELEMENTS + 1)
    values[:GROUP_ELEMENTS] = 2.0

    assert finite.square_sum(values) == 4.0 * GROUP_ELEMENTS


def test_first_value_that_is_not_finite_is_found():
    values = torch.ones(1000)
    values[[7, 900]] = torch.tensor([float("nan"), float("-inf")])

    assert finite.first_not_finite(values) == 7
    assert finite.first_not_finite(values[8:]) == 892


def test_values_whose_squares_overflow_are_finite():
    assert finite.first_not_finite(torch.full((1000,), 3e38)) is None
    assert finite.first_not_finite(torch.zeros(10)) is None
