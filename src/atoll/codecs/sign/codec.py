"""The sign codec: one bit a value and one fp32 scale a block, the mean magnitude.

Seide et al. 2014 (1-bit SGD) and Bernstein et al. 2018 (signSGD); of little use without error
feedback.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from atoll.codecs import tree
from atoll.codecs.blocks import Blocks
from atoll.codecs.sign import loops


@dataclass(frozen=True, slots=True)
class Sign(Blocks):
    """scale = mean of |x| per block; a value decodes to -scale if it is below 0, else to scale.

    Zeros of both signs count as positive. The mean is a tree of adds and one division in fp64,
    which no fp32 overflows, rounded once. A block with a value that is not finite has scale NaN and
    decodes to NaN whole. Bit i of byte j is value 8 j + i; 1 is negative.
    """

    block: int = 256

    name = "sign"
    bits = 1
    piece_loops = loops.LOOPS

    def _quantize(self, blocks: Tensor, work: Tensor, draws: Tensor | None, *, last: int) -> Tensor:
        del draws
        sums = tree.total(torch.abs(blocks, out=work).double())  # [blocks]
        counts = torch.full_like(sums, self.block)
        counts[-1] = last
        damaged = ~torch.isfinite(sums)
        work.fill_(1.0).masked_fill_(blocks < 0, -1.0)
        work[damaged] = 1.0
        return sums.div_(counts).masked_fill_(damaged, torch.nan).float()

    def _pack(self, levels: Tensor, place: Tensor) -> None:
        packed = np.packbits(levels.numpy() < 0, axis=1, bitorder="little")
        place.copy_(torch.from_numpy(packed[:, : place.shape[1]]))

    def _unpack(self, place: Tensor, levels: Tensor) -> None:
        bits = np.unpackbits(place.numpy(), axis=1, count=levels.shape[1], bitorder="little")
        levels.copy_(torch.from_numpy(bits)).mul_(-2.0).add_(1.0)
