"""The int8 codec: one byte a value and one fp32 scale a block.

Payload, group by group: the group's scales (fp32, little-endian), then its values (int8). So the
bytes of any group are reached without reading what is before them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.codecs import buffers
from atoll.codecs.noise import Noise
from atoll.compiled.base import loops_for
from atoll.compiled.numbers import LEVELS, MAX_SCALE, SCALE_BYTES
from atoll.errors import ConfigError
from atoll.layout import GROUP_ELEMENTS

RUN_GROUPS = 4  # groups handled by one call of torch: 1 MiB of fp32
MIN_BLOCK = 16  # below it the scales take a fifth of the payload and more
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
    rounding = "nearest"

    def __post_init__(self) -> None:
        block = self.block
        if not MIN_BLOCK <= block <= GROUP_ELEMENTS or block & (block - 1):
            raise ConfigError(
                f"int8 block={block} must be a power of two from {MIN_BLOCK} to {GROUP_ELEMENTS}; "
                f"256 is the default"
            )

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
        loops = loops_for(elements)
        if loops is not None and buffers.is_aligned(payload):
            loops.encode_int8(values.numpy(), payload.numpy(), self.block)
            return payload
        scratch = torch.empty(self._padded(min(elements, RUN_GROUPS * GROUP_ELEMENTS)))
        whole = elements // GROUP_ELEMENTS * GROUP_ELEMENTS
        for start in range(0, whole, RUN_GROUPS * GROUP_ELEMENTS):
            stop = min(start + RUN_GROUPS * GROUP_ELEMENTS, whole)
            place = payload[self.encoded_bytes(start) : self.encoded_bytes(stop)]
            self._encode_groups(values[start:stop], scratch, place)
        if whole < elements:
            self._encode_tail(values[whole:], scratch, payload[self.encoded_bytes(whole) :])
        return payload

    def _encode_groups(self, values: Tensor, scratch: Tensor, place: Tensor) -> None:
        """Whole groups at once: a call of torch costs as much as a block's arithmetic."""
        work, scales = self._quantize(values, scratch)
        groups = values.numel() // GROUP_ELEMENTS
        rows = place.view(groups, -1)  # [groups, scales and values]
        cut = rows.shape[1] - GROUP_ELEMENTS
        rows[:, :cut].copy_(scales.view(torch.uint8).view(groups, cut))
        rows[:, cut:].view(torch.int8).copy_(work.view(groups, GROUP_ELEMENTS))

    def _encode_tail(self, values: Tensor, scratch: Tensor, place: Tensor) -> None:
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
        low, high = torch.aminmax(absmax)
        if float(low) >= _EASY_MIN and float(high) <= _EASY_MAX:
            scales = absmax.div_(LEVELS)
            torch.div(blocks, scales.unsqueeze(1), out=work).round_()
        else:
            scales = _quantize_with_care(blocks, absmax, work)
        return work, scales

    def decode(self, payload: Tensor, elements: int, *, out: Tensor | None = None) -> Tensor:
        expected_bytes = self.encoded_bytes(elements)
        buffers.check_payload(
            payload, codec=self.name, elements=elements, expected_bytes=expected_bytes
        )
        values = buffers.new_or(out, size=elements, dtype=torch.float32)
        loops = loops_for(elements)
        if loops is not None and buffers.is_aligned(payload):
            loops.decode_int8(payload.numpy(), values.numpy(), self.block)
            return values
        whole = elements // GROUP_ELEMENTS * GROUP_ELEMENTS
        for start in range(0, whole, RUN_GROUPS * GROUP_ELEMENTS):
            stop = min(start + RUN_GROUPS * GROUP_ELEMENTS, whole)
            place = payload[self.encoded_bytes(start) : self.encoded_bytes(stop)]
            self._decode_groups(place, values[start:stop])
        if whole < elements:
            self._decode_tail(payload[self.encoded_bytes(whole) :], values[whole:])
        return values

    def _decode_groups(self, place: Tensor, values: Tensor) -> None:
        groups = values.numel() // GROUP_ELEMENTS
        rows = place.view(groups, -1)  # [groups, scales and values]
        cut = rows.shape[1] - GROUP_ELEMENTS
        # Copied, for the payload may start at any byte.
        scales = rows[:, :cut].clone(memory_format=torch.contiguous_format).view(torch.float32)
        values.view(groups, GROUP_ELEMENTS).copy_(rows[:, cut:].view(torch.int8))
        values.view(-1, self.block).mul_(scales.view(-1, 1))

    def _decode_tail(self, place: Tensor, values: Tensor) -> None:
        size = values.numel()
        num_blocks = -(-size // self.block)
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
        return -(-elements // self.block) * self.block


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
