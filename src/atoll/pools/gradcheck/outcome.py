"""What one step leaves, of the reference or of the ranks, and at which sizes it was made.

Plain values: who computes them and who compares them stand elsewhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

ALL = "all"  # the lane with every term; the others have one term, and the rest at coefficient 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one step, of the reference or of the ranks.

    A tensor that a lane of the reference lacks is not connected to that term; one that a lane of
    the ranks lacks has no gradient there, which is a gradient of 0.
    """

    grads: Mapping[str, Mapping[str, Tensor]]  # lane -> tensor name -> gradient
    losses: Mapping[str, float]  # term (or ALL, their sum) -> scaled loss as logged
    counts: Mapping[str, int]  # term -> global count
    clip_norm: float | None  # global norm of lane ALL over distinct parameters
    differing: tuple[str, ...] = ()  # tensors whose replicas are not equal to the bit


@dataclass(frozen=True, slots=True)
class Size:
    """At which sizes a run was made: `symbols` are what a ratio may be named by."""

    label: str  # "(4, 2x2, 2)"
    symbols: Mapping[str, int]  # {"n_ci": 4, "n_per_block": 2, ...}; of a Loop {"ranks": 2}
