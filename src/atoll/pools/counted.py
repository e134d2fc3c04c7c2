"""What a term says of its rows: a sum that nobody has divided, and what it was summed over."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from atoll.errors import ConfigError
from atoll.sums.partial import PartialSum

Then = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Counted(PartialSum):
    """A term that is a mean: its `total` over these rows, a scalar, and their `count`."""

    def __post_init__(self) -> None:
        # Not super(): the class that slots makes is another one than this method knows.
        _check_total(self)
        if self.total.dim() != 0:
            raise ConfigError(
                f"Counted.total has shape {tuple(self.total.shape)}; a term is one number, so give "
                f"its sum over rows and positions, undivided"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Through(PartialSum):
    """A term that is not linear in a sum over all rows: `then(total, count)` of the global ones.

    `total` may have any shape. `then` is called with the sum and the count of all ranks, the same
    bits on each, and must use nothing else that differs between them.
    """

    then: Then

    def __post_init__(self) -> None:
        _check_total(self)
        if not callable(self.then):
            raise ConfigError(f"Through.then={self.then!r} must be a function of (total, count)")


def _check_total(part: PartialSum) -> None:
    PartialSum.__post_init__(part)
    if not isinstance(part.total, Tensor) or not part.total.is_floating_point():
        told = part.total.dtype if isinstance(part.total, Tensor) else type(part.total).__name__
        raise ConfigError(
            f"total of {type(part).__name__} is {told}; give a floating tensor, which has a "
            f"gradient"
        )
