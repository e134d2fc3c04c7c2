"""The int4 codec: half a byte a value and one fp32 scale a block.

Streaming DiLoCo (arXiv 2501.18512) sends a float of 4 bits. Integers with a scale for every block
are our deviation: the levels are evenly spaced and the scales follow the values.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.codecs.int4 import loops
from atoll.codecs.scaled import Scaled


@dataclass(frozen=True, slots=True)
class Int4(Scaled):
    """scale = absmax / 7 per block; q = round(x / scale); decoded as q * scale.

    Two levels a byte in two's complement, the earlier value in the lower four bits.
    """

    block: int = 128

    name = "int4"
    bits = 4
    piece_loops = loops.LOOPS
    most = loops.LEVELS
    max_scale = loops.MAX_SCALE

    def _pack(self, levels: Tensor, place: Tensor) -> None:
        pairs = levels.to(torch.int8).bitwise_and_(15).view(torch.uint8)  # [groups, size or more]
        pairs = pairs[:, : 2 * place.shape[1]]
        torch.bitwise_or(pairs[:, 0::2], pairs[:, 1::2] << 4, out=place)

    def _unpack(self, place: Tensor, levels: Tensor) -> None:
        halves = torch.stack((place & 15, place >> 4), dim=2).flatten(1)  # [groups, size or more]
        levels.copy_(halves[:, : levels.shape[1]].view(torch.int8).bitwise_xor_(8).sub_(8))

    def _level_below(self, place: Tensor) -> bool:
        return bool((((place & 15) == 8) | ((place >> 4) == 8)).any())
