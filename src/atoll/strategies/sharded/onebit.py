"""1-bit Adam (arXiv:2102.02888): after a warm-up, ranks send the signs of their momenta.

    m_r = beta1*m_r + (1 - beta1)*g_r       on every rank, for the whole model
    M   = sum over ranks of C(m_r + e_r)    C: sign and mean magnitude of a block; e_r what it drops
    p   = p - lr/(1 - beta1^t) * M / (sqrt(v)/sqrt(1 - beta2^w) + eps)

The second moments v stay what they were after the w steps of the warm-up. Momentum is linear, so
the sum of the ranks' momenta is that of the whole, and its owner needs no second compression.

Deviations: the signs are of sums over a step's tokens, which are divided once, so a step's tokens
are taken to be about those of the steps before it; second moments have a floor in
each tile, because a sign carries a block's mean magnitude to elements that hardly ever had one;
clipping is by the norm of M, since nobody ever has the mean gradient.
"""

import logging

import torch
from torch import Tensor

from atoll.codecs.sign.codec import Sign
from atoll.collectives import schedule
from atoll.collectives.base import Collectives, Key
from atoll.collectives.codecs import WireCodec
from atoll.optim.adam import power, root
from atoll.strategies.sharded.adamw import AdamW
from atoll.strategies.sharded.shard import Shard

log = logging.getLogger(__name__)

CODEC: WireCodec | None = WireCodec(Sign())  # None sends the momenta as they are
FLOOR = 0.2  # chosen on small models: 0.1 is nearer to AdamW, and less steady with rare tokens


class Momenta:
    """A rank's own momentum of the whole model, and what its signs have dropped.

    They begin with a group: what an earlier group's ranks had dropped is lost, and the momentum
    that the owners have is theirs alone, which sums to the same.
    """

    def __init__(self, shard: Shard, rule: AdamW) -> None:
        units = shard.units.units
        self._shard = shard
        self._rule = rule
        self._own = [torch.zeros(unit.size, dtype=shard.dtype) for unit in units]
        self._codec = CODEC
        self._residuals = [
            torch.zeros(0 if CODEC is None else unit.size, dtype=torch.bfloat16) for unit in units
        ]
        self._parts = [schedule.cut(unit.size, shard.size)[shard.rank] for unit in units]
        self._is_decayed = False
        self._has_owners = False  # whether the owners' momentum is in it
        log.info("signs of momenta from here on", extra={"bytes": self.nbytes})

    @property
    def nbytes(self) -> int:
        """What they cost every rank: 6 bytes for each element of the whole model."""
        return sum(one.nbytes for one in (*self._own, *self._residuals))

    def begin(self) -> None:
        """A step begins."""
        self._is_decayed = False

    def decay(self) -> None:
        """What was, weighs less; once in a step, before its first gradient that counts.

        Not when a step begins: one of which no rank has rows is refused and leaves all as it was.
        """
        if not self._is_decayed:
            self._is_decayed = True
            for momentum in self._own:
                momentum.mul_(self._rule.beta1)

    def add(self, unit: int, gradient: Tensor) -> None:
        """Takes a micro-batch's gradient in, times its tokens; `gradient` is used up."""
        self._own[unit].add_(gradient.mul_(1 - self._rule.beta1))

    def exchange(self, collectives: Collectives, *, group: int, step: int, tokens: int) -> None:
        """The shard's sums become those of all ranks' momenta; once for each step, at its end."""
        self.decay()
        if not self._has_owners:
            self._has_owners = True
            for unit, part in enumerate(self._parts):
                owned = self._shard.of(unit, "first_moments")
                part.of(self._own[unit]).add_(owned * (self._rule.beta1 * tokens))
        for unit, part in enumerate(self._parts):
            values = self._own[unit].clone()
            out = part.of(values)
            key = Key(group, step, "reduce", unit=unit)
            residual = None if self._codec is None else self._residuals[unit]
            collectives.reduce_scatter(
                key, values, out, codec=self._codec, residual=residual
            ).wait()
            self._shard.of(unit, "sums").copy_(out)
            self._shard.release_unit(unit, "sums")


def update(
    rule: AdamW, tiles: tuple[Tensor, ...], *, lr: float, step: int, warmup: int, decays: bool
) -> None:
    """Moves one tile: weights and first moments, by the momentum; second moments stay.

    `tiles` are weights, momentum, first and second moments; the momentum may be used as scratch.
    """
    weights, momentum, first, second = tiles
    if decays and rule.weight_decay:
        weights.mul_(1 - lr * rule.weight_decay)
    first.copy_(momentum)
    correction = (1 - power(rule.beta2, warmup)) ** 0.5
    divisor = root(second, out=torch.empty_like(second)).div_(correction)
    divisor.clamp_(min=_floor(divisor)).add_(rule.eps)
    step_size = lr / (1 - power(rule.beta1, step))
    weights.sub_(momentum.mul_(step_size).div_(divisor))


def _floor(roots: Tensor) -> float:
    """A share of the root mean square of those that had a gradient at all."""
    seen = int(roots.count_nonzero())
    return FLOOR * float((roots.double().square().sum() / max(1, seen)).sqrt())
