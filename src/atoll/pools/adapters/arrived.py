"""What became of a known gradient, as a part of the sum that it should be, and how that is said."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Arrived:
    """What came of one parameter's gradient, over all ranks, as parts of the sum."""

    name: str
    low: float
    high: float
    is_own: bool  # on every rank it is what that rank sent
    arrived: bool
    ranks: int
    tolerance: float

    def is_sum(self) -> bool:
        """Whether the plain sum arrived everywhere."""
        return self.arrived and self._is(self.low, 1.0) and self._is(self.high, 1.0)

    def verdict(self) -> str:
        """What the gradient is instead of the sum."""
        if not self.arrived:
            return "no gradient arrived"
        if self._is(self.high, self.low):
            named = {1 / self.ranks: " = 1/ranks, the mean", float(self.ranks): " = ranks"}
            fits = [text for ratio, text in named.items() if self._is(self.low, ratio)]
            return f"{self.low:.4g} of the sum{''.join(fits[:1])}"
        if self.is_own:
            return "each rank's own, not summed"
        return f"no scale of the sum, between {self.low:.4g} and {self.high:.4g} of it"

    def _is(self, value: float, wanted: float) -> bool:
        return math.isclose(value, wanted, rel_tol=self.tolerance)


def compared(gradient: Tensor | None, mine: float, total: float) -> tuple[float, ...]:
    """Least part of the sum, most of it negated, whether it is this rank's own, and is there."""
    if gradient is None:
        return (0.0, 0.0, 0.0, 0.0)
    if gradient.numel() == 0:  # an empty shard says nothing
        return (math.inf, math.inf, 1.0, 1.0)
    low, high = (float(v) for v in gradient.to(torch.float64).aminmax())
    near = torch.finfo(gradient.dtype).eps * 4
    own = math.isclose(low, mine, rel_tol=near) and math.isclose(high, mine, rel_tol=near)
    if not (math.isfinite(low) and math.isfinite(high)):
        return (-math.inf, -math.inf, 0.0, 1.0)
    return (low / total, -high / total, float(own), 1.0)
