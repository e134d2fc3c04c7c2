"""The lossless codec: little-endian fp32, as it lies in memory."""

from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.codecs import buffers
from atoll.codecs.noise import Noise
from atoll.layout import ELEMENT_BYTES


@dataclass(frozen=True, slots=True)
class Fp32:
    """Values travel as they are. Without `out`, both directions alias their input."""

    name = "fp32"
    format = "fp32"
    lossless = True

    def fused(self, payload: Tensor, elements: int) -> None:
        """Nothing to gain: both directions are at most one copy."""

    def encoded_bytes(self, elements: int) -> int:
        return elements * ELEMENT_BYTES

    def encode(
        self, values: Tensor, *, noise: Noise | None, first_group: int, out: Tensor | None = None
    ) -> Tensor:
        del noise, first_group  # nothing is rounded
        buffers.check_values(values)
        raw = values.view(torch.uint8)
        if out is None:
            return raw
        return buffers.new_or(out, size=raw.numel(), dtype=torch.uint8).copy_(raw)

    def decode(self, payload: Tensor, elements: int, *, out: Tensor | None = None) -> Tensor:
        buffers.check_payload(self, payload, elements)
        if out is None:
            return buffers.typed(payload, torch.float32)
        values = buffers.new_or(out, size=elements, dtype=torch.float32)
        values.view(torch.uint8).copy_(payload)
        return values
