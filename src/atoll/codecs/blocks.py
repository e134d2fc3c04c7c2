"""Codecs whose blocks share an fp32 scale: value = level * scale, a few bits a level.

Payload, group by group: the group's scales (fp32, little-endian), then its levels. So the bytes of
any group are reached without reading what is before them. Owns the cutting and the layout; which
scale and levels a block has is the codec's own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from atoll.codecs import buffers
from atoll.codecs.noise import Noise
from atoll.codecs.pieces import PieceFused, PieceLoops
from atoll.compiled.base import compiled
from atoll.errors import FrameError
from atoll.layout import GROUP_ELEMENTS, Span

SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Blocks:
    """What codecs with a scale per block have in common. Each gives the class names below."""

    block: int

    name: ClassVar[str]
    bits: ClassVar[int]  # of a level
    piece_loops: ClassVar[PieceLoops]
    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        # The settings' rule. With another block a group's scales would not end where it does, and
        # a loop, which checks no bounds, would write beyond the payload.
        assert GROUP_ELEMENTS % self.block == 0, self.block

    @property
    def format(self) -> str:
        return f"{self.name}_{self.block}"

    def fused(self, payload: Tensor, elements: int) -> PieceFused | None:
        is_fit = compiled.ready(elements) and self._suits_loops(payload)
        return PieceFused(self, self.piece_loops, self.block) if is_fit else None

    def _suits_loops(self, payload: Tensor) -> bool:
        """For one direction of any length: chunks between ranks are smaller than tiles."""
        return buffers.is_aligned(payload) and compiled.ready_for_any()

    def encoded_bytes(self, elements: int) -> int:
        # Blocks divide a group, so the last group alone can hold a short one.
        return SCALE_BYTES * -(-elements // self.block) + -(-elements * self.bits // 8)

    def encode(
        self, values: Tensor, *, noise: Noise | None, first_group: int, out: Tensor | None = None
    ) -> Tensor:
        buffers.check_values(values)
        elements = values.numel()
        payload = buffers.new_or(out, size=self.encoded_bytes(elements), dtype=torch.uint8)
        if self._encode_in_a_loop(values, payload, noise, first_group):
            return payload
        # One run of groups, or all of a smaller span, in whole blocks.
        scratch = torch.empty(min(elements + self.block, buffers.RUN_GROUPS * GROUP_ELEMENTS))
        for span in _runs(elements):
            place = payload[self.encoded_bytes(span.start) : self.encoded_bytes(span.stop)]
            draws = self._draws(noise, first_group + span.first_group, len(span))
            self._encode_groups(span.of(values), scratch, place, draws)
        return payload

    def _encode_in_a_loop(
        self, values: Tensor, payload: Tensor, noise: Noise | None, first_group: int
    ) -> bool:
        """Whether a compiled loop has done it all."""
        del noise, first_group
        if not self._suits_loops(payload):
            return False
        self.piece_loops.encode(values.numpy(), payload.numpy(), self.block)
        return True

    def _encode_groups(
        self, values: Tensor, scratch: Tensor, place: Tensor, draws: Tensor | None
    ) -> None:
        """Groups of one size at once: [groups * size] -> [groups * (scales and levels)]."""
        size = min(GROUP_ELEMENTS, values.numel())
        groups = values.numel() // size
        # The last block is filled up with zeros, which change no scale.
        blocks = self._filled(values).view(-1, self.block)  # [blocks, block]
        work = scratch[: blocks.numel()].view(-1, self.block)
        short = values.numel() - (len(blocks) - 1) * self.block  # values of the last block
        noise = None if draws is None else self._filled(draws).view(-1, self.block)
        scales = self._quantize(blocks, work, noise, last=short)
        rows = place.view(groups, -1)  # [groups, scales and levels]
        cut = SCALE_BYTES * -(-size // self.block)  # bytes of a group's scales
        rows[:, :cut].copy_(scales.view(torch.uint8).view(groups, cut))
        self._pack(work.view(groups, -1), rows[:, cut:])

    def _filled(self, values: Tensor) -> Tensor:
        missing = -values.numel() % self.block
        return torch.nn.functional.pad(values, (0, missing)) if missing else values

    def _draws(self, noise: Noise | None, first_group: int, elements: int) -> Tensor | None:
        """What rounding adds to the quotients of a run of groups; None: it rounds to nearest."""
        del noise, first_group, elements
        return None

    def _quantize(self, blocks: Tensor, work: Tensor, draws: Tensor | None, *, last: int) -> Tensor:
        """The scales [blocks], with the levels [blocks, block] in `work`, as fp32.

        `last` is how many values of the last block there are; the others are zeros.
        """
        raise NotImplementedError(self.name)

    def _pack(self, levels: Tensor, place: Tensor) -> None:
        """Levels (fp32, [groups, size or more]) into `place` (uint8, [groups, bytes])."""
        raise NotImplementedError(self.name)

    def _unpack(self, place: Tensor, levels: Tensor) -> None:
        """The other way, into `levels` [groups, size]."""
        raise NotImplementedError(self.name)

    def check(self, payload: Tensor, elements: int) -> None:
        """FrameError unless `payload` has the right size and no bits behind the last level."""
        buffers.check_payload(self, payload, elements)
        used = elements * self.bits % 8
        if used and int(payload[-1]) >> used:
            raise FrameError(
                f"{self.name} payload of {elements} elements ends with byte {int(payload[-1])}, "
                f"of which {used} bits are used; the others must be 0"
            )

    def check_spelling(self, payload: Tensor, elements: int) -> None:
        """FrameError for bytes that no encoder writes: a scale below 0, a level out of bounds.

        `decode` takes them, so that whatever was accepted once can be folded again.
        """
        self.check(payload, elements)
        for span in _runs(elements):
            place = payload[self.encoded_bytes(span.start) : self.encoded_bytes(span.stop)]
            size = min(GROUP_ELEMENTS, len(span))
            rows = place.view(len(span) // size, -1)  # [groups, scales and levels]
            cut = SCALE_BYTES * -(-size // self.block)
            scales = rows[:, :cut].clone(memory_format=torch.contiguous_format).view(torch.float32)
            # What is NaN is refused as not finite.
            if bool((torch.signbit(scales) & ~torch.isnan(scales)).any()):
                raise FrameError(f"{self.name} payload has a scale below 0; scales are magnitudes")
            self._check_levels(rows[:, cut:])

    def _check_levels(self, place: Tensor) -> None:
        """FrameError for a level that the codec never writes."""

    def decode(self, payload: Tensor, elements: int, *, out: Tensor | None = None) -> Tensor:
        self.check(payload, elements)
        values = buffers.new_or(out, size=elements, dtype=torch.float32)
        if self._suits_loops(payload):
            self.piece_loops.decode(payload.numpy(), values.numpy(), self.block)
            return values
        for span in _runs(elements):
            place = payload[self.encoded_bytes(span.start) : self.encoded_bytes(span.stop)]
            self._decode_groups(place, span.of(values))
        return values

    def _decode_groups(self, place: Tensor, values: Tensor) -> None:
        size = min(GROUP_ELEMENTS, values.numel())
        groups = values.numel() // size
        rows = place.view(groups, -1)  # [groups, scales and levels]
        cut = SCALE_BYTES * -(-size // self.block)
        # Copied, for the payload may start at any byte. [blocks, 1]
        scales = rows[:, :cut].clone(memory_format=torch.contiguous_format).view(torch.float32)
        scales = scales.view(-1, 1)
        self._unpack(rows[:, cut:], values.view(groups, size))
        whole = values.numel() // self.block
        values[: whole * self.block].view(-1, self.block).mul_(scales[:whole])
        values[whole * self.block :].mul_(scales[-1])  # the last block, where it is short


def _runs(elements: int) -> Iterator[Span]:
    """What one call of torch handles: some whole groups at a time, then the short last one."""
    whole = elements // GROUP_ELEMENTS * GROUP_ELEMENTS
    yield from buffers.runs(whole)
    if whole < elements:
        yield Span(whole, elements)
