"""The int8 codec: one byte a value and one fp32 scale a block.

Payload, group by group: the group's scales (fp32, little-endian), then its values (int8). So the
bytes of any group are reached without reading what is before them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.codecs import buffers
from atoll.codecs.int8 import loops
from atoll.codecs.int8.loops import LEVELS, MAX_SCALE, SCALE_BYTES
from atoll.codecs.noise import Noise
from atoll.compiled.base import compiled
from atoll.layout import GROUP_ELEMENTS

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
        # One run of groups, or all of a smaller span: [elements rounded up to whole blocks].
        scratch = torch.empty(self._padded(min(elements, buffers.RUN_GROUPS * GROUP_ELEMENTS)))
        whole = elements // GROUP_ELEMENTS * GROUP_ELEMENTS
        for span in buffers.runs(whole):
            place = payload[self.encoded_bytes(span.start) : self.encoded_bytes(span.stop)]
            self._encode_groups(values[span.start : span.stop], scratch, place)
        if whole < elements:
            self._encode_tail(values[whole:], scratch, payload[self.encoded_bytes(whole) :])
        return payload

    def _encode_groups(self, values: Tensor, scratch: Tensor, place: Tensor) -> None:
        """Whole groups at once, `values` [groups * GROUP_ELEMENTS]."""
        work, scales = self._quantize(values, scratch)
        groups = values.numel() // GROUP_ELEMENTS
        rows = place.view(groups, -1)  # [groups, scales and values]
        cut = rows.shape[1] - GROUP_ELEMENTS  # bytes of a group's scales
        rows[:, :cut].copy_(scales.view(torch.uint8).view(groups, cut))
        rows[:, cut:].view(torch.int8).copy_(work.view(groups, GROUP_ELEMENTS))

    def _encode_tail(self, values: Tensor, scratch: Tensor, place: Tensor) -> None:
        """The last group, which is shorter, as may be its last block."""
        size = values.numel()
        # The last block is filled up with zeros, which change no absmax.
        padded = torch.nn.functional.pad(values, (0, self._padded(size) - size))
        work, scales = self._quantize(padded, scratch)
        cut = scales.numel() * SCALE_BYTES
        place[:cut].copy_(scales.view(torch.uint8))
        place[cut:].view(torch.int8).copy_(work.view(-1)[:size])

    def _quantize(self, values: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor]:
        """Quotients [blocks, block], in `scratch`, and the scales [blocks]."""
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
        whole = elements // GROUP_ELEMENTS * GROUP_ELEMENTS
        for span in buffers.runs(whole):
            place = payload[self.encoded_bytes(span.start) : self.encoded_bytes(span.stop)]
            self._decode_groups(place, values[span.start : span.stop])
        if whole < elements:
            self._decode_tail(payload[self.encoded_bytes(whole) :], values[whole:])
        return values

    def _decode_groups(self, place: Tensor, values: Tensor) -> None:
        groups = values.numel() // GROUP_ELEMENTS
        rows = place.view(groups, -1)  # [groups, scales and values]
        cut = rows.shape[1] - GROUP_ELEMENTS
        # Copied, for the payload may start at any byte. [groups, blocks of a group]
        scales = rows[:, :cut].clone(memory_format=torch.contiguous_format).view(torch.float32)
        values.view(groups, GROUP_ELEMENTS).copy_(rows[:, cut:].view(torch.int8))
        values.view(-1, self.block).mul_(scales.view(-1, 1))  # one scale for each row of a block

    def _decode_tail(self, place: Tensor, values: Tensor) -> None:
        size = values.numel()
        num_blocks = -(-size // self.block)  # the last one may be short
        cut = num_blocks * SCALE_BYTES
        scales = torch.empty(num_blocks)
        scales.view(torch.uint8).copy_(place[:cut])
        values.copy_(place[cut:].view(torch.int8))
        whole = size // self.block
        full = whole * self.block
        values[:full].view(-1, self.block).mul_(scales[:whole].unsqueeze(1))
        if full < size:
            values[full:].mul_(scales[-1])

    def _padded(self, elements: int) -> int:
        """`elements`, rounded up to whole blocks."""
        return -(-elements // self.block) * self.block


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
