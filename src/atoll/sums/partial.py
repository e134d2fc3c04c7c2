"""The partial sum: the only kind of value that crosses a reduction.

Owns the `+` and the one division. Knows no order (that is `sums.fold`) and no network.
"""

from dataclasses import dataclass

from torch import Tensor

from atoll.errors import EmptySum, ProtocolError


@dataclass(frozen=True, slots=True, eq=False)
class PartialSum:
    """A sum that is still waiting for other terms, and what it was summed over.

    `unit` names what `count` counts (tokens, rows, contributions). Two sums are compared by their
    fields: `==` of the values themselves is identity, since tensors have no single truth value.
    """

    total: Tensor
    count: int
    unit: str

    def __post_init__(self) -> None:
        check_count("count", self.count)

    def __add__(self, other: "PartialSum") -> "PartialSum":
        """The sum of both, in new memory: one addition per element, `self` on the left."""
        if self.unit != other.unit:
            raise ProtocolError(
                f"a sum over {self.unit!r} meets one over {other.unit!r}; "
                f"both sides of a reduction must count the same unit"
            )
        check_alike(self.total, other.total)
        return PartialSum(self.total + other.total, self.count + other.count, self.unit)

    def mean(self) -> Tensor:
        """`total / count` in new memory, the only division of a reduction.

        Raises EmptySum when nothing was summed.
        """
        if self.count == 0:
            raise EmptySum(
                f"no {self.unit} arrived, so there is no mean over {self.unit!r}; "
                f"the model is unchanged"
            )
        # A count above 2^24 is rounded to fp32 here, once, for every element alike.
        return self.total / float(self.count)


def check_count(name: str, value: int) -> None:
    """Raises ProtocolError unless `value` is an integer of at least 0."""
    # bool is an int to Python, but a truth value was never counted.
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ProtocolError(
            f"{name}={value!r} must be an integer of at least 0; it says what was summed"
        )


def check_alike(left: Tensor, right: Tensor) -> None:
    """Raises ProtocolError when adding the two would broadcast or change the dtype."""
    if left.shape != right.shape or left.dtype != right.dtype:
        raise ProtocolError(
            f"a term of shape {tuple(right.shape)} and {right.dtype} meets a sum of shape "
            f"{tuple(left.shape)} and {left.dtype}; all terms of a sum must be alike"
        )
