"""The bf16 codec: the upper half of fp32, rounded to nearest or stochastically."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from atoll.codecs import buffers
from atoll.codecs import noise as noises
from atoll.codecs.bf16 import loops
from atoll.codecs.noise import Noise
from atoll.codecs.settings import Rounding
from atoll.compiled.arrays import Halves
from atoll.compiled.base import compiled
from atoll.layout import GROUP_ELEMENTS

VALUE_BYTES = 2
_MAX = 3.3895313892515355e38  # the largest finite bf16, bits 0x7f7f
_MAX_BITS = 0x7F7F0000
_INF_BITS = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF
_QUIET = 0x00400000  # the top mantissa bit; a NaN that keeps it survives the loss of the low half


@dataclass(frozen=True, slots=True)
class Bf16:
    """Two bytes a value, little-endian.

    `nearest` is torch's cast: ties to even, and a finite value from the middle between the largest
    bf16 and 2^128 on becomes infinite. `stochastic` adds 16 uniform bits to the fp32
    pattern and drops the lower half: right on average, exact for what bf16 can represent, and never
    infinite for a finite value.
    """

    rounding: Rounding = "nearest"

    name = "bf16"
    lossless = False

    @property
    def format(self) -> str:
        return f"{self.name}_{self.rounding}"

    def fused(self, payload: Tensor, elements: int) -> "Bf16Fused | None":
        # Noise is drawn group by group from numpy, which no loop can do.
        is_plain = self.rounding == "nearest" and buffers.is_aligned(payload)
        return Bf16Fused() if is_plain and compiled.ready(elements) else None

    def encoded_bytes(self, elements: int) -> int:
        return elements * VALUE_BYTES

    def encode(
        self, values: Tensor, *, noise: Noise | None, first_group: int, out: Tensor | None = None
    ) -> Tensor:
        buffers.check_values(values)
        elements = values.numel()
        payload = buffers.new_or(out, size=self.encoded_bytes(elements), dtype=torch.uint8)
        # At an odd address torch sees no 16-bit numbers: round beside it, then copy the bytes.
        halves = buffers.typed(payload, torch.bfloat16)
        if self.rounding == "nearest":
            halves.copy_(values)
        else:
            drawn = noises.required(noise, self.name)
            _round_stochastic(
                values, halves.view(torch.int16), noise=drawn, first_group=first_group
            )
        if halves.data_ptr() != payload.data_ptr():
            payload.copy_(halves.view(torch.uint8))
        return payload

    def decode(self, payload: Tensor, elements: int, *, out: Tensor | None = None) -> Tensor:
        buffers.check_payload(self, payload, elements)
        halves = buffers.typed(payload, torch.bfloat16)
        return buffers.new_or(out, size=elements, dtype=torch.float32).copy_(halves)


class Bf16Fused:
    """The loops on torch's tensors; see `codecs.base.Fused`."""

    def feed(self, values: Tensor, residual: Tensor, payload: Tensor, *, decay: float) -> None:
        loops.feed(values.numpy(), _bits(residual), _bits(payload), np.float32(decay))

    def publish(self, master: Tensor, published: Tensor, payload: Tensor) -> None:
        loops.publish(master.numpy(), published.numpy(), _bits(payload))

    def square_sum(self, payload: Tensor, elements: int) -> None:
        """Decoding is a shift: a loop would gain nothing."""


def _bits(halves: Tensor) -> Halves:
    bits: Halves = halves.view(torch.uint16).numpy()
    return bits


def _round_stochastic(values: Tensor, halves: Tensor, *, noise: Noise, first_group: int) -> None:
    """`values` (fp32, [n]) into `halves` (int16, [n]), group by group as the noise is drawn."""
    bits = values.view(torch.int32)
    scratch = torch.empty(min(GROUP_ELEMENTS, values.numel()), dtype=torch.int32)  # one group
    for index, span in buffers.groups(values.numel()):
        # Added to the half that goes: they carry with a probability as large as that half.
        draw = torch.from_numpy(noise.bits16(first_group + index, len(span)))
        sums = scratch[: len(span)].copy_(draw)
        # The pattern is sign and magnitude: adding to it moves both signs away from zero.
        sums.add_(bits[span.start : span.stop])
        # Hardly ever: weights and displacements are small. With a NaN both comparisons are false.
        low, high = torch.aminmax(values[span.start : span.stop])
        if not (low > -_MAX and high < _MAX):
            _keep_class(bits[span.start : span.stop], sums)
        halves[span.start : span.stop].copy_(sums.bitwise_right_shift_(16))


def _keep_class(bits: Tensor, sums: Tensor) -> None:
    """Undoes what noise must not do: finite stays finite, infinity and NaN stay themselves."""
    magnitude = bits & _MAGNITUDE
    sign = bits & ~_MAGNITUDE
    # A finite value near the maximum that noise carried to infinity: the largest bf16 instead.
    carried = (magnitude < _INF_BITS) & ((sums & _MAGNITUDE) >= _INF_BITS)
    sums.copy_(torch.where(carried, sign | _MAX_BITS, sums))
    # Infinity plus noise is a NaN, and a NaN may lose its mantissa with the lower half.
    special = torch.where(magnitude > _INF_BITS, bits | _QUIET, bits)
    sums.copy_(torch.where(magnitude >= _INF_BITS, special, sums))
