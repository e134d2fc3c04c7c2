"""What a file declares: pools, axes, and functions that say by name what they need."""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from atoll.errors import ConfigError

Kind = Literal["rows", "parameters", "value", "state", "term"]
ROWS, DRAW, INDEX = "rows", "draw", "index"


@dataclass(frozen=True, slots=True)
class Pool:
    """A group of ranks that do the same; of several blocks, each has `ranks` and items of an axis.

    The ranks of a block share the rows of a step out among them.
    """

    name: str
    ranks: int  # of a block
    blocks: int = 1

    @property
    def size(self) -> int:
        """Ranks of all blocks."""
        return self.ranks * self.blocks

    def __str__(self) -> str:
        return f"{self.name!r} ({self.ranks} ranks)"


@dataclass(frozen=True, slots=True)
class Axis:
    """Items that the blocks of a pool share out."""

    name: str
    items: tuple[str, ...]
    over: str  # pool

    def of_block(self, block: int, blocks: int) -> tuple[str, ...]:
        """The items of one block: as even as can be, in order."""
        count = len(self.items)
        return self.items[block * count // blocks : (block + 1) * count // blocks]


@dataclass(frozen=True, slots=True)
class Function:
    """One declared function: the reference calls it on all rows, a rank on its own."""

    kind: Kind
    name: str
    call: Callable[..., Any]
    asks: tuple[str, ...]
    pool: str = ""  # where it is computed, or who owns it
    axis: str | None = None  # called once for each of its items
    coeff: float = 1.0
    once: bool = False


def name_of(call: Callable[..., Any]) -> str:
    """What a function is called by those who ask for it."""
    name: str = getattr(call, "__name__", f"<{type(call).__name__}>")
    return name


def check_name(name: object) -> None:
    """ConfigError unless a function can ask for it by this name, and `--sizes` can hold it."""
    if not isinstance(name, str) or not name.isidentifier():
        raise ConfigError(
            f"{name!r} is no name that a function can ask for; take letters, digits and _, and "
            f"a function that def has named"
        )


def check_items(axis: str, items: object) -> None:
    """ConfigError unless the items can stand in the names of tensors."""
    found = [] if isinstance(items, str) or not isinstance(items, Sequence) else list(items)
    wrong = [one for one in found if not isinstance(one, str) or not one or set("[]") & set(one)]
    if not found or wrong:
        raise ConfigError(
            f"axis {axis!r} has items {wrong or items!r}; give a list of strings, none empty and "
            f"without [ and ], which stand around them in the names of tensors"
        )


def check_coeff(name: str, coeff: object) -> None:
    """ConfigError unless it is a number."""
    if isinstance(coeff, bool) or not isinstance(coeff, int | float) or not math.isfinite(coeff):
        raise ConfigError(f"coeff={coeff!r} of {name!r} must be a finite number")


def asked(call: Callable[..., Any]) -> tuple[str, ...]:
    """The names that a function asks for."""
    found = inspect.signature(call).parameters.values()
    for one in found:
        if one.kind not in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
            raise ConfigError(
                f"{name_of(call)} takes {one}; a declared function asks for what it needs by plain "
                f"names, so that edges follow from them"
            )
    return tuple(one.name for one in found)


def check_size(name: str, value: object) -> int:
    """`value`, if it is a whole number from 1 on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r} must be an integer of at least 1")
    return value


def axis_of(call: Callable[..., Any], asks: Sequence[str], axes: Sequence[str]) -> str | None:
    """The axis that a function asks for, if it does."""
    found = [name for name in asks if name in axes]
    if len(found) > 1:
        raise ConfigError(
            f"{name_of(call)} asks for {found}; a function is called once for each item of one "
            f"axis at most"
        )
    return found[0] if found else None
