"""A codec in one file, as a developer would add it: settings and codec, and nothing else edited.

It is known only where a test registers it: `CodecSettings.known` is the process's own.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from atoll.codecs import buffers
from atoll.codecs.noise import Noise
from atoll.codecs.settings import CodecSettings, LossySettings

_MOST = 32767  # -32768 stands for what is not finite


class StepsSettings(LossySettings):
    """How many steps there are between 0 and 1."""

    codec: Literal["steps"] = "steps"
    steps: Annotated[int, Field(ge=1, le=32768)] = 4096

    def build(self) -> "Steps":
        return Steps(self.steps)


# Defining it made it known; for the tests of the built-in codecs it must not be.
del CodecSettings.known["steps"]


@dataclass(frozen=True, slots=True)
class Steps:
    """Fixed point, two bytes a value: round(x * steps), within what 16 bits hold."""

    steps: int = 4096

    name = "steps"
    lossless = False

    @property
    def format(self) -> str:
        return f"steps_{self.steps}"

    def fused(self, payload: Tensor, elements: int) -> None:
        """No loops."""

    def encoded_bytes(self, elements: int) -> int:
        return 2 * elements

    def encode(
        self, values: Tensor, *, noise: Noise | None, first_group: int, out: Tensor | None = None
    ) -> Tensor:
        buffers.check_values(values)
        payload = buffers.new_or(out, size=2 * values.numel(), dtype=torch.uint8)
        levels = (values * float(self.steps)).round_().clamp_(-_MOST, _MOST)
        levels[~torch.isfinite(values)] = -_MOST - 1
        return payload.copy_(levels.to(torch.int16).view(torch.uint8))

    def decode(self, payload: Tensor, elements: int, *, out: Tensor | None = None) -> Tensor:
        buffers.check_payload(self, payload, elements)
        levels = payload.clone().view(torch.int16)
        values = buffers.new_or(out, size=elements, dtype=torch.float32).copy_(levels)
        values.div_(float(self.steps))
        return values.masked_fill_(levels == -_MOST - 1, torch.nan)
