"""The int8 codec: one byte a value and one fp32 scale a block.

Payload, group by group: the group's scales (fp32, little-endian), then its values (int8). So the
bytes of any group are reached without reading what is before them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.codecs import buffers
from atoll.codecs.int8 import loops
from atoll.codecs.int8.loops import LEVELS, MAX_SCALE, SCALE_BYTES
from atoll.codecs.noise import Noise
from atoll.compiled.base import compiled
from atoll.layout import GROUP_ELEMENTS, Span

# Between these an absmax has a normal scale that does not overflow, and the quotient is at most
# 127 * (1 + 2^-23), which rounds to 127: no clamp, no zero and no NaN to care for.
_EASY_MIN = 2.0**-110
_EASY_MAX = 2.0**120


@dataclass(frozen=True, slots=True)
class Int8:
    """scale = absmax / 127 per block; q = round(x / scale), ties to even; decoded as q * scale.

    A block of zeros has scale 0. A block with a value that is not finite has scale NaN and decodes
    to NaN whole. Only separate divide, round and multiply: the same bits on every instruction set.
    """

    block: int = 256

    name = "int8"
    lossless = False

    def __post_init__(self) -> None:
        # The settings' rule. With another block a group's scales would not end where it does, and
        # a loop, which checks no bounds, would write beyond the payload.
        assert GROUP_ELEMENTS % self.block == 0, self.block

    @property
    def format(self) -> str:
        return f"{self.name}_{self.block}"

    def fused(self, payload: Tensor, elements: int) -> "Int8Fused | None":
        is_fit = buffers.is_aligned(payload) and compiled.ready(elements)
        return Int8Fused(self) if is_fit else None

    def encoded_bytes(self, elements: int) -> int:
        # Blocks divide a group, so the last group alone can hold a short one.
        return elements + SCALE_BYTES * -(-elements // self.block)

    def encode(
        self, values: Tensor, *, noise: Noise | None, first_group: int, out: Tensor | None = None
    ) -> Tensor:
        del noise, first_group  # rounds to nearest
        buffers.check_values(values)
        elements = values.numel()
        payload = buffers.new_or(out, size=self.encoded_bytes(elements), dtype=torch.uint8)
        if self.fused(payload, elements) is not None:
            loops.encode(values.numpy(), payload.numpy(), self.block)
            return payload
        # One run of groups, or all of a smaller span, in whole blocks.
        scratch = torch.empty(min(elements + self.block, buffers.RUN_GROUPS * GROUP_ELEMENTS))
        for span in _runs(elements):
            place = payload[self.encoded_bytes(span.start) : self.encoded_bytes(span.stop)]
            self._encode_groups(values[span.start : span.stop], scratch, place)
        return payload

    def _encode_groups(self, values: Tensor, scratch: Tensor, place: Tensor) -> None:
        """Groups of one size at once: [groups * size] -> [groups * (scales and values)]."""
        work, scales = self._quantize(values, scratch)
        size = min(GROUP_ELEMENTS, values.numel())
        groups = values.numel() // size
        rows = place.view(groups, -1)  # [groups, scales and values]
        cut = rows.shape[1] - size  # bytes of a group's scales
        rows[:, :cut].copy_(scales.view(torch.uint8).view(groups, cut))
        rows[:, cut:].view(torch.int8).copy_(work.view(groups, -1)[:, :size])

    def _quantize(self, values: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor]:
        """Quotients [blocks, block], in `scratch`, and the scales [blocks]."""
        if missing := -values.numel() % self.block:
            # The last block is filled up with zeros, which change no absmax.
            values = torch.nn.functional.pad(values, (0, missing))
        blocks = values.view(-1, self.block)  # [blocks, block]
        work = scratch[: values.numel()].view(-1, self.block)
        absmax = torch.abs(blocks, out=work).amax(dim=1)  # [blocks]
        low, high = torch.aminmax(absmax)  # NaN in any block makes both NaN, which is not easy
        if float(low) >= _EASY_MIN and float(high) <= _EASY_MAX:
            # Divided, not multiplied by 1/127, which is no fp32 and would round a second time.
            scales = absmax.div_(LEVELS)
            torch.div(blocks, scales.unsqueeze(1), out=work).round_()
        else:
            scales = _quantize_with_care(blocks, absmax, work)
        return work, scales

    def decode(self, payload: Tensor, elements: int, *, out: Tensor | None = None) -> Tensor:
        buffers.check_payload(self, payload, elements)
        values = buffers.new_or(out, size=elements, dtype=torch.float32)
        if self.fused(payload, elements) is not None:
            loops.decode(payload.numpy(), values.numpy(), self.block)
            return values
        for span in _runs(elements):
            place = payload[self.encoded_bytes(span.start) : self.encoded_bytes(span.stop)]
            self._decode_groups(place, values[span.start : span.stop])
        return values

    def _decode_groups(self, place: Tensor, values: Tensor) -> None:
        size = min(GROUP_ELEMENTS, values.numel())
        groups = values.numel() // size
        rows = place.view(groups, -1)  # [groups, scales and values]
        cut = rows.shape[1] - size
        # Copied, for the payload may start at any byte. [blocks, 1]
        scales = rows[:, :cut].clone(memory_format=torch.contiguous_format).view(torch.float32)
        scales = scales.view(-1, 1)
        values.view(groups, size).copy_(rows[:, cut:].view(torch.int8))
        whole = values.numel() // self.block
        values[: whole * self.block].view(-1, self.block).mul_(scales[:whole])
        values[whole * self.block :].mul_(scales[-1])  # the last block, where it is short


@dataclass(frozen=True, slots=True)
class Int8Fused:
    """The loops on torch's tensors; see `codecs.base.Fused`."""

    codec: Int8

    def feed(self, values: Tensor, residual: Tensor, payload: Tensor) -> None:
        kept = residual.view(torch.uint16).numpy()
        loops.feed(values.numpy(), kept, payload.numpy(), self.codec.block)

    def publish(self, master: Tensor, published: Tensor, payload: Tensor) -> None:
        loops.publish(master.numpy(), published.numpy(), payload.numpy(), self.codec.block)

    def square_sum(self, payload: Tensor, elements: int) -> float:
        # A loop would read beyond the end of a short payload.
        buffers.check_payload(self.codec, payload, elements)
        return loops.square_sum(payload.numpy(), elements, self.codec.block)


def _quantize_with_care(blocks: Tensor, absmax: Tensor, work: Tensor) -> Tensor:
    """The scales, with the quotients in `work`, where an absmax is zero, extreme or not finite."""
    damaged = ~torch.isfinite(absmax)
    scales = (absmax / LEVELS).clamp_(max=MAX_SCALE).masked_fill_(damaged, torch.nan)
    # A tiny absmax may round to scale 0 too; dividing by 1 gives q = 0, never 0 / 0.
    divisors = scales.masked_fill(scales == 0, 1.0)
    torch.div(blocks, divisors.unsqueeze(1), out=work)
    # The rounding of a subnormal or clamped scale can push a quotient past 127.
    work.round_().clamp_(-LEVELS, LEVELS)
    work[damaged] = 0.0  # NaN to int8 is undefined and differs between machines
    return scales


def _runs(elements: int) -> Iterator[Span]:
    """What one call of torch handles: some whole groups at a time, then the short last one."""
    whole = elements // GROUP_ELEMENTS * GROUP_ELEMENTS
    yield from buffers.runs(whole)
    if whole < elements:
        yield Span(whole, elements)
