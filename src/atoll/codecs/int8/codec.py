"""The int8 codec: one byte a value and one fp32 scale a block."""

from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.codecs.int8 import loops
from atoll.codecs.scaled import Scaled


@dataclass(frozen=True, slots=True)
class Int8(Scaled):
    """scale = absmax / 127 per block; q = round(x / scale); decoded as q * scale."""

    block: int = 256

    name = "int8"
    bits = 8
    piece_loops = loops.LOOPS
    most = loops.LEVELS
    max_scale = loops.MAX_SCALE

    def _pack(self, levels: Tensor, place: Tensor) -> None:
        place.view(torch.int8).copy_(levels[:, : place.shape[1]])

    def _unpack(self, place: Tensor, levels: Tensor) -> None:
        levels.copy_(place.view(torch.int8))

    def _level_below(self, place: Tensor) -> bool:
        return bool(place.view(torch.int8).amin() < -self.most)
