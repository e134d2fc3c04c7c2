"""What a run's settings say about the outer optimizer; each has the settings it uses.

Kept apart from the optimizers because settings are read where torch is not.
"""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from atoll.settings import Choice, Fraction

if TYPE_CHECKING:
    from atoll.optim.base import OuterOptimizer

# A mistyped one would be in force for good: published weights that overflowed come from no replay.
OuterRate = Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)]


class OuterSettings(Choice):
    """The outer optimizer, applied by the coordinator to a mean displacement, or to each."""

    key: ClassVar[str] = "optimizer"
    default: ClassVar[str] = "nesterov"
    known: ClassVar[dict[str, type[Choice]]] = {}

    optimizer: str
    lr: OuterRate = 0.7  # DiLoCo, arXiv 2311.08105

    def build(self) -> "OuterOptimizer":
        """The optimizer itself; the first call loads it, and torch with it."""
        raise NotImplementedError(f"{type(self).__name__} names no optimizer")


class SgdSettings(OuterSettings):
    """No state, nothing but a rate."""

    optimizer: Literal["sgd"] = "sgd"

    def build(self) -> "OuterOptimizer":
        from atoll.optim.sgd import Sgd

        return Sgd(self.lr)


class NesterovSettings(OuterSettings):
    """DiLoCo's own."""

    optimizer: Literal["nesterov"] = "nesterov"
    momentum: Fraction = 0.9

    def build(self) -> "OuterOptimizer":
        from atoll.optim.nesterov import Nesterov

        return Nesterov(self.lr, self.momentum)


class DelayedNesterovSettings(OuterSettings):
    """Nesterov for contributions that are applied one by one, as they come."""

    optimizer: Literal["delayed_nesterov"] = "delayed_nesterov"
    momentum: Fraction = 0.9
    # Contributions from one step of the momentum to the next: as many as islands. Exact in fp32.
    delay: Annotated[int, Field(ge=1, le=2**24)] = 2

    def build(self) -> "OuterOptimizer":
        from atoll.optim.delayed_nesterov import DelayedNesterov

        return DelayedNesterov(self.lr, self.momentum, delay=self.delay)


class AdamSettings(OuterSettings):
    """Adam without weight decay."""

    optimizer: Literal["adam"] = "adam"
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    # From the smallest normal fp32 on: a smaller one could round to 0, and a step divide by it.
    eps: Annotated[float, Field(ge=2.0**-126, allow_inf_nan=False)] = 1e-8

    def build(self) -> "OuterOptimizer":
        from atoll.optim.adam import Adam

        return Adam(self.lr, self.beta1, beta2=self.beta2, eps=self.eps)
