"""Symmetric levels: scale = absmax / most, level = x / scale rounded to an integer within ±most.

What `int8` and `int4` share; they differ in `most` and in how levels are packed. Rounding is to
nearest, ties to even, or stochastic: level = floor(x / scale + u), where u is 16 random bits of the
value's place as a fraction, so it is right on average.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from atoll.codecs import buffers
from atoll.codecs import noise as noises
from atoll.codecs.blocks import Blocks
from atoll.codecs.noise import HashedNoise, Noise
from atoll.codecs.pieces import PieceFused
from atoll.codecs.settings import Rounding
from atoll.compiled.arrays import Floats
from atoll.compiled.bits import INFINITY_BITS, largest_bits
from atoll.compiled.jit import loop
from atoll.errors import FrameError
from atoll.layout import GROUP_ELEMENTS

# Between these an absmax has a normal scale that does not overflow, and a quotient is at most one
# fp32 beyond `most`: the nearest integer is `most`, and a draw, at most 1 - 2^-16, does not lift it
# to the next. No zero and no NaN to care for, and no clamp but where a draw of 0 leaves a quotient
# below -`most`, whose floor is a level that is not there.
_EASY_MIN = 2.0**-110
_EASY_MAX = 2.0**120

_F, _I, _U = np.float32, np.int32, np.uint32
_INFINITY = _I(INFINITY_BITS)
_NAN, _ZERO = _F(np.nan), _F(0.0)
# 1.5 * 2^23: what is below 2^22 becomes an integer when this is added, ties to even.
_ROUNDER = _F(12582912.0)
_UNIT = _F(2.0**-16)  # of 16 random bits as a fraction
_FIRST, _SECOND = _U(0x7FEB352D), _U(0x846CA68B)  # of `HashedNoise`
_HALF, _FIFTEEN = _U(16), _U(15)


@dataclass(frozen=True, slots=True)
class Scaled(Blocks):
    """Levels by the largest magnitude of a block.

    A block of zeros has scale 0. A block with a value that is not finite has scale NaN and levels 0
    and decodes to NaN whole. Only separate divide, round and multiply: the same bits on every
    instruction set.
    """

    rounding: Rounding = "nearest"

    most: ClassVar[float]
    max_scale: ClassVar[float]  # the largest fp32 whose product with `most` is finite

    @property
    def format(self) -> str:
        plain = f"{self.name}_{self.block}"
        return plain if self.rounding == "nearest" else f"{plain}_{self.rounding}"

    def fused(self, payload: Tensor, elements: int) -> PieceFused | None:
        # Noise is drawn group by group from numpy, which no loop of these can do.
        return Blocks.fused(self, payload, elements) if self.rounding == "nearest" else None

    def _encode_in_a_loop(
        self, values: Tensor, payload: Tensor, noise: Noise | None, first_group: int
    ) -> bool:
        if self.rounding == "nearest":
            return Blocks._encode_in_a_loop(self, values, payload, noise, first_group)
        drawn = self.piece_loops.encode_drawn
        if drawn is None or not isinstance(noise, HashedNoise) or not self._suits_loops(payload):
            return False
        groups = -(-values.numel() // GROUP_ELEMENTS)
        drawn(values.numpy(), payload.numpy(), self.block, noise.seeds(first_group, groups))
        return True

    def _level_below(self, place: Tensor) -> bool:
        """Whether packed levels hold the one below -`most`, which two's complement has besides."""
        raise NotImplementedError(self.name)

    def _check_levels(self, place: Tensor) -> None:
        if self._level_below(place):
            raise FrameError(
                f"{self.name} payload has the level {-self.most - 1:.0f}; levels are within "
                f"-{self.most:.0f} and {self.most:.0f}"
            )

    def _draws(self, noise: Noise | None, first_group: int, elements: int) -> Tensor | None:
        if self.rounding == "nearest":
            return None
        given = noises.required(noise, self.name)
        drawn = [
            given.bits16(first_group + index, len(span)) for index, span in buffers.groups(elements)
        ]
        return torch.from_numpy(np.concatenate(drawn)).float().mul_(2.0**-16)

    def _quantize(self, blocks: Tensor, work: Tensor, draws: Tensor | None, *, last: int) -> Tensor:
        del last  # zeros change no absmax
        absmax = torch.abs(blocks, out=work).amax(dim=1)  # [blocks]
        low, high = torch.aminmax(absmax)  # NaN in any block makes both NaN, which is not easy
        if float(low) >= _EASY_MIN and float(high) <= _EASY_MAX:
            # Divided, not multiplied by 1 / most, which is no fp32 and would round a second time.
            scales = absmax.div_(self.most)
            _round(torch.div(blocks, scales.unsqueeze(1), out=work), draws)
            if draws is not None:
                work.clamp_(min=-self.most)  # one fp32 below -most, a draw of 0 goes a level down
            return scales
        return self._quantize_with_care(blocks, absmax, work, draws)

    def _quantize_with_care(
        self, blocks: Tensor, absmax: Tensor, work: Tensor, draws: Tensor | None
    ) -> Tensor:
        """Where an absmax is zero, extreme or not finite."""
        damaged = ~torch.isfinite(absmax)
        scales = (absmax / self.most).clamp_(max=self.max_scale).masked_fill_(damaged, torch.nan)
        # A tiny absmax may round to scale 0 too; dividing by 1 gives no 0 / 0.
        divisors = scales.masked_fill(scales == 0, 1.0)
        _round(torch.div(blocks, divisors.unsqueeze(1), out=work), draws)
        # The rounding of a subnormal or clamped scale can push a quotient past `most`.
        work.clamp_(-self.most, self.most)
        # NaN to an integer is undefined and differs between machines; with scale 0 all is 0.
        work[damaged | (scales == 0)] = 0.0
        return scales


def _round(quotients: Tensor, draws: Tensor | None) -> None:
    """In place, to an integer: the nearest, or the one below the sum with `draws`, [0, 1)."""
    if draws is None:
        quotients.round_()
    else:
        quotients.add_(draws).floor_()


@loop()
def set_scale(values: Floats, scale: Floats, most: np.float32, max_scale: np.float32) -> np.float32:
    """One block's scale goes to `scale[0]`; returns what to divide by, 0 where all levels are 0."""
    largest = largest_bits(values)
    if largest >= _INFINITY:
        scale[0] = _NAN  # decodes to NaN whole, so nobody takes the block for sound
        return _ZERO
    scale.view(np.int32)[0] = largest  # these bits are the largest magnitude
    found = scale[0] / most
    found = max_scale if found > max_scale else found
    scale[0] = found
    return _F(found)  # a tiny absmax may round to 0 too


@loop()
def level(value: np.float32, divisor: np.float32, most: np.int32) -> np.int32:
    """The nearest level, ties to even."""
    found = _I((value / divisor + _ROUNDER) - _ROUNDER)
    # The rounding of a subnormal or clamped scale can push a quotient past `most`.
    found = most if found > most else found
    return -most if found < -most else found


@loop()
def drawn_level(
    value: np.float32, divisor: np.float32, most: np.float32, draw: np.float32
) -> np.float32:
    """The level below the quotient plus a draw of [0, 1)."""
    found = np.floor(_F(value / divisor) + draw)
    found = most if found > most else found
    return -most if found < -most else found


@loop()
def draw_of(count: np.uint32, second: np.uint32) -> np.float32:
    """What `HashedNoise` draws where its counter, place plus s0, is `count`; as a fraction."""
    x = count
    x = _U(_U(x ^ _U(x >> _HALF)) * _FIRST)
    x = _U(_U(x ^ _U(x >> _FIFTEEN)) ^ second)
    x = _U(_U(x * _SECOND) >> _HALF)
    return _F(_I(x)) * _UNIT


@loop()
def weighed(scale: np.float32, squares: np.int32, largest: np.int32) -> float:
    """The sum of squares of a block: infinite or NaN exactly when one of its values is."""
    # As fp32 the largest value may be infinite where the scale is not.
    is_sound = np.isfinite(scale * _F(largest))
    wide = np.float64(scale) if is_sound else np.inf
    return wide * wide * np.float64(squares)
