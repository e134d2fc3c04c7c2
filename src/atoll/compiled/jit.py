"""How loops are compiled: as they are written, without the interpreter's lock."""

from collections.abc import Callable
from typing import TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])


def loop(function: F) -> F:
    """`function` compiled at its first call.

    No fastmath: every operation rounds on its own and none are joined, so the bits are those of
    IEEE 754 on every processor. Division by zero gives infinity or NaN, as in torch.
    """
    return cast(F, numba.njit(function, nogil=True, error_model="numpy"))
