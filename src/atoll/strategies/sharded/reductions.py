"""Gradients on their way to the ranks that own them, and what this rank has summed in a step."""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.collectives.base import Collectives, Handle, Key
from atoll.collectives.codecs import WireCodec
from atoll.strategies.sharded.seconds import Seconds
from atoll.strategies.sharded.shard import Shard

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Reducing:
    """A unit's gradient on its way to its owners."""

    unit: int
    gradient: Tensor
    own: Tensor  # the part of it that this rank's sum will be in
    handle: Handle


class Reductions:
    """Those of one engine; sums go to its shard. One thread uses it."""

    def __init__(
        self,
        shard: Shard,
        seconds: Seconds,
        *,
        codec: WireCodec | None,
        residuals: bool,
    ) -> None:
        """`residuals` keep what the codec dropped: two bytes for each element of the model."""
        self._shard, self._seconds = shard, seconds
        self._codec = codec
        self._residuals = [
            torch.zeros(unit.size, dtype=torch.bfloat16) if residuals else None
            for unit in shard.units.units
        ]
        if residuals:
            log.info("residuals of gradients begin at zero", extra={"bytes": self.residual_nbytes})
        self._reducing: list[_Reducing] = []
        self.summed: set[int] = set()  # units, in this step

    def begin(
        self, collectives: Collectives, key: Key, unit: int, gradient: Tensor, own: Tensor
    ) -> None:
        """Sends a unit's gradient; the sum of `own`, its part of this rank, comes at `settle`."""
        handle = collectives.reduce_scatter(
            key, gradient, own, codec=self._codec, residual=self._residuals[unit]
        )
        self._reducing.append(_Reducing(unit, gradient, own, handle))

    def settle(self, *, leaving: int) -> None:
        """Adds what was reduced to this rank's sums, but for the last few."""
        while len(self._reducing) > leaving:
            done = self._reducing[0]
            with self._seconds.of("reduce"):
                done.handle.wait()
            del self._reducing[0]
            sums = self._shard.of(done.unit, "sums")
            if done.unit in self.summed:
                sums.add_(done.own)
            else:
                sums.copy_(done.own)
                self.summed.add(done.unit)
            self._shard.release_unit(done.unit, "sums")

    @property
    def handles(self) -> list[Handle]:
        """Of those under way."""
        return [one.handle for one in self._reducing]

    def abandon(self) -> None:
        """Forgets those under way; residuals begin at zero again."""
        self._reducing.clear()
        for residual in self._residuals:
            if residual is not None:
                residual.zero_()  # of a step that never was

    @property
    def nbytes(self) -> int:
        """Of gradients under way."""
        return sum(one.gradient.nbytes for one in self._reducing)

    @property
    def residual_nbytes(self) -> int:
        """Of residuals, which are held all the time."""
        return sum(0 if one is None else one.nbytes for one in self._residuals)
