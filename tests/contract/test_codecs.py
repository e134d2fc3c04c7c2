"""What every codec owes, whatever its format; a new codec is done when it passes."""

import hashlib
from dataclasses import fields
from typing import Any, cast

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from atoll.codecs import registry
from atoll.codecs.base import Codec
from atoll.codecs.bf16.codec import Bf16
from atoll.codecs.fp32.codec import Fp32
from atoll.codecs.int4.codec import Int4
from atoll.codecs.int8.codec import Int8
from atoll.codecs.noise import Noise
from atoll.codecs.settings import CodecSettings
from atoll.codecs.sign.codec import Sign
from atoll.codecs.topk.codec import TopK
from atoll.errors import ConfigError, FrameError
from atoll.layout import ELEMENT_BYTES, GROUP_ELEMENTS, Layout, cut
from tests.steps import Steps, StepsSettings

BUILT_IN: list[Codec] = [
    Fp32(),
    Bf16(),
    Bf16(rounding="stochastic"),
    Int8(),
    Int8(block=16),
    Int8(block=GROUP_ELEMENTS),
    Int8(rounding="stochastic"),
    Int4(),
    Int4(block=16),
    Int4(rounding="stochastic"),
    Sign(),
    Sign(block=16),
    TopK(),
]
CODECS = [*BUILT_IN, Steps()]
# A level may be any bits; what says where values are has rules (`unit/test_topk.py`).
DENSE = [codec for codec in CODECS if codec.name != "topk"]
NOISE = Noise(seed=7, round=3, lane="island-0")
SIZES = [1, 15, 255, 256, 257, GROUP_ELEMENTS - 1, GROUP_ELEMENTS, 2 * GROUP_ELEMENTS + 1000]

every_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.format)
every_size = pytest.mark.parametrize("size", SIZES)


def values_of(size: int, *, seed: int = 0) -> torch.Tensor:
    """Values of many magnitudes, out of raw integers: what randn gives depends on the machine."""
    raw = np.random.Philox(key=seed).random_raw(size)
    mantissas = (raw >> np.uint64(40)).astype(np.float32) - np.float32(2**23)
    exponents = (raw & np.uint64(31)).astype(np.int32) - 40
    return torch.from_numpy(np.ldexp(mantissas, exponents))


def encode(codec: Codec, values: torch.Tensor, *, first_group: int = 0) -> torch.Tensor:
    return codec.encode(values, noise=NOISE, first_group=first_group)


def unaligned(data: torch.Tensor) -> torch.Tensor:
    room = torch.empty(data.numel() + 1, dtype=torch.uint8)[1:]
    return room.copy_(data)


@every_codec
@every_size
def test_codec_encodes_to_exactly_the_bytes_it_announces(codec, size):
    payload = encode(codec, values_of(size))

    assert payload.dtype == torch.uint8
    assert payload.shape == (codec.encoded_bytes(size),)


@every_codec
def test_codec_encodes_whole_groups_to_one_size_each(codec):
    group = codec.encoded_bytes(GROUP_ELEMENTS)

    sizes = [codec.encoded_bytes(k * GROUP_ELEMENTS) for k in (1, 2, 7, 1000)]

    assert sizes == [group, 2 * group, 7 * group, 1000 * group]


@every_codec
def test_codec_gives_the_same_bytes_for_any_tile_of_whole_groups(codec):
    values = values_of(3 * GROUP_ELEMENTS + 777)

    whole = encode(codec, values)
    tiles = [
        encode(codec, tile, first_group=group)
        for group, tile in enumerate(values.split(GROUP_ELEMENTS))
    ]

    assert torch.equal(torch.cat(tiles), whole)


@every_codec
def test_codec_encodes_a_fragment_like_a_buffer_of_its_own(codec):
    """Wherever it starts in the run's buffer: groups and noise count from its own start."""
    run = Layout.of([("a", (777,), "float32"), ("b", (2 * GROUP_ELEMENTS + 5,), "float32")])
    values = values_of(run.size)
    _, fragment = cut(run, [["a"], ["b"]])
    mine = fragment.of(values)

    tiles = [
        encode(codec, mine[tile.start : tile.stop], first_group=tile.first_group)
        for tile in fragment.layout.tiles(GROUP_ELEMENTS * ELEMENT_BYTES)
    ]

    assert torch.equal(torch.cat(tiles), encode(codec, mine.clone()))


@every_codec
def test_codec_decodes_a_tile_out_of_the_middle_of_a_payload(codec):
    values = values_of(3 * GROUP_ELEMENTS + 777)
    payload = encode(codec, values)
    start = codec.encoded_bytes(GROUP_ELEMENTS)

    tile = codec.decode(payload[start : 2 * start], GROUP_ELEMENTS)

    whole = codec.decode(payload, values.numel())
    assert torch.equal(tile, whole[GROUP_ELEMENTS : 2 * GROUP_ELEMENTS])


@every_codec
@every_size
def test_codec_writes_into_given_memory_what_it_would_return(codec, size):
    values = values_of(size)
    payload = encode(codec, values).clone()
    room = torch.full((codec.encoded_bytes(size),), 0xAA, dtype=torch.uint8)
    decoded = torch.full((size,), torch.nan)

    codec.encode(values, noise=NOISE, first_group=0, out=room)
    codec.decode(payload, size, out=decoded)

    assert torch.equal(room, payload)
    assert torch.equal(decoded, codec.decode(payload, size))


@every_codec
@every_size
def test_codec_works_at_any_alignment(codec, size):
    values = values_of(size)
    payload = encode(codec, values).clone()
    room = unaligned(torch.zeros_like(payload))

    codec.encode(values, noise=NOISE, first_group=0, out=room)

    assert torch.equal(room, payload)
    assert torch.equal(codec.decode(unaligned(payload), size), codec.decode(payload, size))


@every_codec
@every_size
def test_codec_never_writes_its_input(codec, size):
    values = values_of(size)
    before = values.clone()
    payload = encode(codec, values).clone()
    payload_before = payload.clone()

    encode(codec, values)
    codec.decode(payload, size)

    assert torch.equal(values, before)
    assert torch.equal(payload, payload_before)


@every_codec
def test_codec_is_lossless_exactly_as_it_says(codec):
    values = values_of(1000)

    decoded = codec.decode(encode(codec, values), 1000)

    assert torch.equal(decoded.view(torch.int32), values.view(torch.int32)) == codec.lossless


@every_codec
@pytest.mark.parametrize("change", [-1, 1, 4096])
def test_codec_refuses_a_payload_of_another_size(codec, change):
    size = 1000
    payload = torch.zeros(codec.encoded_bytes(size) + change, dtype=torch.uint8)

    with pytest.raises(FrameError, match=rf"{payload.numel()} bytes where 1000 elements"):
        codec.decode(payload, size)


@every_codec
def test_codec_refuses_before_it_touches_the_given_memory(codec):
    out = torch.full((10,), 5.0)

    with pytest.raises(FrameError):
        codec.decode(torch.zeros(3, dtype=torch.uint8), 10, out=out)

    assert torch.equal(out, torch.full((10,), 5.0))


@every_codec
def test_codec_refuses_a_negative_number_of_elements(codec):
    with pytest.raises(FrameError, match="-1 elements"):
        codec.decode(torch.zeros(0, dtype=torch.uint8), -1)


@every_codec
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_codec_carries_what_is_not_finite_as_not_finite(codec, bad):
    values = values_of(GROUP_ELEMENTS + 300)
    values[GROUP_ELEMENTS + 299] = bad

    decoded = codec.decode(encode(codec, values), values.numel())

    assert not torch.isfinite(decoded[-1])


@pytest.mark.parametrize("codec", DENSE, ids=lambda codec: codec.format)
def test_codec_decodes_any_bytes_without_an_error(codec):
    size = GROUP_ELEMENTS + 304  # no value shares its last byte with bits that mean nothing
    noise = np.random.default_rng(1).integers(0, 256, codec.encoded_bytes(size), dtype=np.uint8)

    decoded = codec.decode(torch.from_numpy(noise), size)

    assert decoded.shape == (size,)


@every_codec
def test_codec_encodes_nothing_to_no_bytes(codec):
    payload = encode(codec, torch.empty(0))

    assert payload.shape == (codec.encoded_bytes(0),) == (0,)
    assert codec.decode(payload, 0).shape == (0,)


@every_codec
def test_codec_keeps_zeros(codec):
    decoded = codec.decode(encode(codec, torch.zeros(1000)), 1000)

    assert torch.equal(decoded, torch.zeros(1000))


@every_codec
def test_codec_does_not_depend_on_the_number_of_threads(codec):
    values = values_of(GROUP_ELEMENTS + 300)
    threads = torch.get_num_threads()

    torch.set_num_threads(2)
    two = encode(codec, values).clone()
    torch.set_num_threads(1)
    one = encode(codec, values).clone()
    torch.set_num_threads(threads)

    assert torch.equal(one, two)


@every_codec
def test_codec_is_rebuilt_from_its_settings(codec, monkeypatch):
    monkeypatch.setitem(CodecSettings.known, "steps", StepsSettings)
    told = {field.name: getattr(codec, field.name) for field in fields(cast(Any, codec))}

    settings = CodecSettings.model_validate({"codec": codec.name, **told})

    assert settings.build() == codec
    assert settings.keeps_residual is not codec.lossless


def test_every_built_in_codec_is_held_to_this_suite():
    assert {codec.name for codec in BUILT_IN} == set(registry.versions())


# Golden digests: one line a codec, over the payload and what it decodes to.

# Compared in `integration/test_bits.py`, in a process for each CPU capability.
GOLDEN = {
    "fp32": "b97c339f510305fff36f911db0b8192f8be111717a50edf71299a4ef42a1f580",
    "bf16_nearest": "1d57453d0bb2ba3840793f344b97f84ccd26075b019d651a52b777b0a1003a53",
    "bf16_stochastic": "88ed7708418933a331be1f96b7202ae6db80bc060ff228793a22ad9102e6834f",
    "int8_256": "d05a66f85d3c80fa341238f0c08827ee38490c81bfaeec975e370fd601def31f",
    "int8_16": "f7744afe4001d62a5fb9865e7dfb590ed26e55d70c4eec9b1f95dc36925a0a1a",
    "int8_65536": "9957330c9952004ea3b8c155ab9fbff31ef9a6a0178ea775afc6f5dc3c72cce1",
    "int8_256_stochastic": "48300d7256785f8cf370e5831091c27be8756fbb5bd676cac29f33bcd53e342d",
    "int4_128": "20b9e8792f747a87d9837297d87a207ec1a8ea1bf0ef6007c28c5c52374931c6",
    "int4_16": "28096c3028f4ec8be41f957eb0bfd187b8b40876e35353e54f7e54f59d56457e",
    "int4_128_stochastic": "fb16b0d8e6945ea1e3380aa07aa0f8dccd490772dd40f6e96669a8c5dbada049",
    "sign_256": "4385a52887cf6cf9d225e57d3411614dad7a1aef83aed6f1f9de36b7c0d35cbc",
    "sign_16": "d6d9607b23b6a2dc2db8476828b3770ef296231239142377df3ae86b9e27c6d3",
    "topk_64": "c5050de07666d8af2f38ffa96c066ab9ceb749e5e9e455eb9088bf81f469067f",
}


def golden_lines(tile: int = 2 * GROUP_ELEMENTS) -> list[str]:
    """With tiles of so many elements, which are whole groups."""
    values = values_of(GROUP_ELEMENTS + 300)
    values[:256] = 0.0
    values[256:512] *= 2.0**-140
    values[512:768] *= 2.0**110
    lines = []
    for codec in BUILT_IN:
        payloads = [
            encode(codec, part, first_group=index * tile // GROUP_ELEMENTS)
            for index, part in enumerate(values.split(tile))
        ]
        parts = zip(payloads, values.split(tile), strict=True)
        decoded = [codec.decode(payload, part.numel()) for payload, part in parts]
        both = b"".join(part.numpy().tobytes() for part in (*payloads, *decoded))
        lines.append(f"{codec.format} {hashlib.sha256(both).hexdigest()}")
    return lines


# Each format against an independent reference.


def test_fp32_is_little_endian_memory():
    payload = Fp32().encode(torch.tensor([1.0, -2.5]), noise=None, first_group=0)

    assert payload.numpy().tobytes().hex() == "0000803f000020c0"


def test_fp32_aliases_its_input_when_no_memory_is_given():
    values = values_of(100)

    payload = Fp32().encode(values, noise=None, first_group=0)

    assert payload.data_ptr() == values.data_ptr()


def test_bf16_nearest_rounds_ties_to_even():
    bits = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF], dtype=torch.int32)

    payload = Bf16().encode(bits.view(torch.float32), noise=None, first_group=0)

    assert payload.view(torch.int16).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F80]


def test_bf16_stochastic_is_the_pattern_plus_noise_without_its_lower_half():
    values = values_of(GROUP_ELEMENTS + 300)
    bits = values.numpy().view(np.uint32)
    draws = np.concatenate([NOISE.bits16(5, GROUP_ELEMENTS), NOISE.bits16(6, 300)])

    payload = encode(Bf16(rounding="stochastic"), values, first_group=5)

    expected = ((bits.astype(np.uint64) + draws) >> 16).astype(np.uint16)
    assert np.array_equal(payload.numpy().view(np.uint16), expected)


def test_bf16_stochastic_is_right_on_average():
    value = 1.0 + 2.0**-7 * 0.3  # 0.3 of the way between two neighbours
    values = torch.full((GROUP_ELEMENTS,), value)

    decoded = Bf16(rounding="stochastic").decode(
        encode(Bf16(rounding="stochastic"), values), GROUP_ELEMENTS
    )

    # Six standard deviations of the mean of n draws of a step of 2^-7.
    tolerance = 6 * 2.0**-7 * (0.3 * 0.7 / GROUP_ELEMENTS) ** 0.5
    assert abs(decoded.double().mean().item() - value) < tolerance


def test_bf16_stochastic_is_exact_for_what_bf16_represents():
    values = values_of(GROUP_ELEMENTS).bfloat16().float()
    codec = Bf16(rounding="stochastic")

    decoded = codec.decode(encode(codec, values), GROUP_ELEMENTS)

    assert torch.equal(decoded, values)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_bf16_stochastic_keeps_finite_values_finite(sign):
    values = torch.full((1000,), sign * torch.finfo(torch.float32).max)
    codec = Bf16(rounding="stochastic")

    decoded = codec.decode(encode(codec, values), 1000)

    largest = sign * torch.finfo(torch.bfloat16).max
    assert torch.equal(decoded, torch.full((1000,), largest))


@pytest.mark.parametrize("pattern", [0x7FFFFFFF, 0x7F800001, -1, -0x7FFFFF])
def test_bf16_stochastic_keeps_every_nan_a_nan(pattern):
    values = torch.full((1000,), pattern, dtype=torch.int32).view(torch.float32)
    codec = Bf16(rounding="stochastic")

    decoded = codec.decode(encode(codec, values), 1000)

    assert torch.isnan(decoded).all()


def test_bf16_stochastic_keeps_infinity_and_its_sign():
    values = torch.tensor([float("inf"), float("-inf")])
    codec = Bf16(rounding="stochastic")

    decoded = codec.decode(encode(codec, values), 2)

    assert torch.equal(decoded, values)


def test_bf16_stochastic_treats_the_neighbours_of_a_nan_as_always():
    values = values_of(1000)
    damaged = values.clone()
    damaged[500] = torch.nan
    codec = Bf16(rounding="stochastic")

    payload = encode(codec, damaged).view(torch.int16)

    expected = encode(codec, values).view(torch.int16)
    assert torch.equal(payload[:500], expected[:500])
    assert torch.equal(payload[501:], expected[501:])


def test_bf16_stochastic_refuses_to_work_without_noise():
    with pytest.raises(ConfigError, match="no noise"):
        Bf16(rounding="stochastic").encode(torch.zeros(3), noise=None, first_group=0)


def int8_reference(values: np.ndarray, block: int) -> bytes:
    """The payload by the definition, one block at a time, in numpy."""
    payload = b""
    for group in range(0, len(values), GROUP_ELEMENTS):
        part = values[group : group + GROUP_ELEMENTS]
        scales, quotients = b"", b""
        for start in range(0, len(part), block):
            piece = part[start : start + block]
            scale = np.max(np.abs(piece)) / np.float32(127)
            q = np.rint(piece / scale) if scale else np.zeros_like(piece)
            scales += scale.astype("<f4").tobytes()
            quotients += np.clip(q, -127, 127).astype(np.int8).tobytes()
        payload += scales + quotients
    return payload


@pytest.mark.parametrize("block", [64, 256])
def test_int8_payload_is_the_definition_block_by_block(block):
    values = values_of(GROUP_ELEMENTS + 300)
    values[:512] = 0.0
    values[512:1024] *= 2.0**-140  # subnormal scales

    payload = encode(Int8(block=block), values)

    assert payload.numpy().tobytes() == int8_reference(values.numpy(), block)


@pytest.mark.parametrize("neighbour", [1.0, 0.0], ids=["ordinary", "zeros"])
def test_int8_rounds_ties_to_even(neighbour):
    values = torch.full((512,), neighbour)
    values[:6] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5])  # scale 1

    payload = encode(Int8(), values)

    assert payload[8:14].view(torch.int8).tolist() == [127, 0, 2, 2, 0, -2]


def test_int8_clamps_what_a_rounded_down_subnormal_scale_pushes_past_127():
    smallest = 2.0**-149
    values = torch.tensor([190.0, -190.0, 3.0]) * smallest  # 190 / 127 rounds to scale 1 * 2^-149

    payload = encode(Int8(), values)

    assert payload[:4].view(torch.float32).item() == smallest
    assert payload[4:].view(torch.int8).tolist() == [127, -127, 3]


def test_int8_writes_zeros_where_the_scale_of_a_tiny_block_rounds_to_zero():
    values = torch.tensor([1.0, -1.0]) * 2.0**-149

    payload = encode(Int8(), values)

    assert torch.equal(payload, torch.zeros(6, dtype=torch.uint8))


def test_int8_decodes_to_one_product_of_quotient_and_scale():
    values = values_of(1000)
    payload = encode(Int8(), values)
    scales = payload[:16].view(torch.float32).numpy()
    quotients = payload[16:].view(torch.int8).numpy()

    decoded = Int8().decode(payload, 1000)

    expected = quotients.astype(np.float32) * np.repeat(scales, 256)[:1000]
    assert np.array_equal(decoded.numpy(), expected)


def test_int8_is_off_by_at_most_half_a_step():
    values = values_of(GROUP_ELEMENTS)
    scales = values.view(-1, 256).abs().amax(dim=1, keepdim=True) / 127

    decoded = Int8().decode(encode(Int8(), values), GROUP_ELEMENTS)

    # Half a step, plus the roundings of quotient and product: 2 * 127 * 2^-24 of a step.
    steps = (decoded - values).view(-1, 256).abs() / scales
    assert steps.max() <= 0.5 + 127 * 2.0**-22


@pytest.mark.parametrize("odd", [0.0, 2.0**-149, float("nan"), float("inf"), 3.4e38])
def test_int8_encodes_a_block_the_same_whatever_its_neighbours_hold(odd):
    values = values_of(GROUP_ELEMENTS)
    other = values.clone()
    other[256:512] = odd

    payload = encode(Int8(), other)

    expected = encode(Int8(), values)
    keep = torch.ones(GROUP_ELEMENTS // 256, dtype=torch.bool)
    keep[1] = False
    assert torch.equal(payload[:1024].view(-1, 4)[keep], expected[:1024].view(-1, 4)[keep])
    assert torch.equal(payload[1024:].view(-1, 256)[keep], expected[1024:].view(-1, 256)[keep])


@pytest.mark.parametrize("size", [256, 300])
def test_int8_keeps_finite_values_finite(size):
    values = torch.full((size,), torch.finfo(torch.float32).max)
    values[1] *= -1

    decoded = Int8().decode(encode(Int8(), values), size)

    assert torch.isfinite(decoded).all()
    assert torch.allclose(decoded, values, rtol=2.0**-22)


def test_int8_writes_a_damaged_block_as_nan_scale_and_zeros():
    values = values_of(256)
    values[3] = float("-inf")

    payload = encode(Int8(), values)

    assert torch.isnan(payload[:4].view(torch.float32)).all()
    assert torch.equal(payload[4:], torch.zeros(256, dtype=torch.uint8))


@pytest.mark.parametrize("block", [0, -256, 8, 255, 257, 2 * GROUP_ELEMENTS])
def test_int8_refuses_a_block_that_is_no_power_of_two_in_range(block):
    with pytest.raises(ValidationError) as refused:
        CodecSettings.model_validate({"codec": "int8", "block": block})

    assert refused.value.errors()[0]["loc"] == ("block",)
