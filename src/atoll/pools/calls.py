"""Calling a declared function with what it asks for by name.

Used by the reference and on ranks alike: the only thing they have in common.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from atoll.errors import AtollError, ConfigError, EmptySum
from atoll.pools.counted import Counted, Through
from atoll.pools.declared import DRAW, INDEX, Axis, Function
from atoll.pools.draws import Draw

Item = str | None  # None: of no axis


class Box:
    """Kept state: whoever asks for it may put another `value` in, of the same shape, by row."""

    def __init__(self, value: Tensor) -> None:
        self._value = value.detach()

    @property
    def value(self) -> Tensor:
        return self._value

    @value.setter
    def value(self, changed: Tensor) -> None:
        if changed.shape != self._value.shape:
            raise ConfigError(
                f"state of shape {tuple(self._value.shape)} was given one of "
                f"{tuple(changed.shape)}; it is kept by row and keeps its shape"
            )
        self._value = changed.detach()


class ByItem(dict[str, Any]):
    """One thing for each item of an axis."""

    def __init__(self, axis: str, found: Mapping[str, Any]) -> None:
        super().__init__(found)
        self.axis = axis


def called(
    function: Function, things: Mapping[str, Any], *, item: Item, index: Tensor, seed: int
) -> Any:
    """What the function returns for an item, given by name what it asks for."""
    given: dict[str, Any] = {}
    for name in function.asks:
        if name == DRAW:
            given[name] = Draw(seed=seed, name=function.name, item=item, index=index)
        elif name == INDEX:
            given[name] = index
        elif name == function.axis:
            given[name] = item
        else:
            given[name] = _of_item(things[name], function, item)
    with named(function, item):
        return function.call(**given)


@contextmanager
def named(function: Function, item: Item) -> Iterator[None]:
    """Around a call of what the user wrote: what it raises says which function it was."""
    try:
        yield
    except Exception as error:
        told = str(error) if isinstance(error, AtollError) else f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{function.kind} {function.name!r}{of(item)} raised while it was called: {told}"
        ) from error


def of(item: Item) -> str:
    """How messages name the item of a call."""
    return "" if item is None else f" of {item!r}"


def _of_item(thing: Any, function: Function, item: Item) -> Any:
    if not isinstance(thing, ByItem):
        return thing
    return thing[item] if item is not None and thing.axis == function.axis else dict(thing)


def given(
    function: Function, item: Item, axis: str | None, parts: Sequence[Item]
) -> Sequence[Item]:
    """Which parts of a thing by `axis` one call of a function is given."""
    is_cut = item is not None and axis == function.axis
    return [part for part in parts if not is_cut or part == item]


def items(function: Function, here: Mapping[str, Sequence[str]]) -> Sequence[Item]:
    """For what a function is called; `here` are the items of each axis that this place has."""
    return [None] if function.axis is None else list(here[function.axis])


def over_items(
    function: Function,
    things: Mapping[str, Any],
    *,
    here: Mapping[str, Sequence[str]],
    index: Tensor,
    seed: int,
) -> dict[Item, Any]:
    """What the function returns for each of its items here."""
    return {
        item: called(function, things, item=item, index=index, seed=seed)
        for item in items(function, here)
    }


def joined(function: Function, found: Mapping[Item, Any], axes: Mapping[str, Axis]) -> Any:
    """One thing, or one for each item of an axis, as others are given it."""
    if function.axis is not None:
        return ByItem(function.axis, {str(item): one for item, one in found.items()})
    (alone,) = found.values()
    if not isinstance(alone, dict):
        return alone
    fitting = [axis.name for axis in axes.values() if tuple(alone) == axis.items]
    if len(fitting) == 1:
        return ByItem(fitting[0], alone)
    raise ConfigError(
        f"{function.kind} {function.name!r} returns a dict of {list(alone)}, which are the items "
        f"of {fitting or 'no axis'}; give a tensor, or a dict by the items of one axis, all of "
        f"them and in order: "
        f"{ {axis.name: list(axis.items) for axis in axes.values()} }"
    )


def tensors(name: str, thing: Any, *, rows: int) -> dict[Item, Tensor]:
    """A value's or a state's tensors by item; ConfigError unless each has a row for each row."""
    parts: dict[Item, Any] = {None: thing}
    if isinstance(thing, ByItem):
        parts = {item: part for item, part in thing.items()}
    for item, part in parts.items():
        is_fit = isinstance(part, Tensor) and part.dim() > 0 and len(part) == rows
        if not is_fit or part.dtype != torch.get_default_dtype():
            told = f"{part.dtype} {tuple(part.shape)}" if isinstance(part, Tensor) else "no tensor"
            raise ConfigError(
                f"{name!r}{of(item)} is {type(part).__name__} ({told}); values and state are "
                f"tensors of {torch.get_default_dtype()} whose first dimension has the {rows} rows"
            )
    return parts


def term_parts(function: Function, found: Mapping[Item, Any]) -> dict[Item, Counted | Through]:
    """What a term returned for each item; ConfigError unless all are sums of one kind and unit."""
    for item, part in found.items():
        if not isinstance(part, Counted | Through):
            raise ConfigError(
                f"term {function.name!r}{of(item)} returned {type(part).__name__}; return "
                f"Counted(total, count, unit), undivided, or Through(sums, count, unit, then)"
            )
        if function.once and isinstance(part, Through):
            raise ConfigError(
                f"term {function.name!r} has once=True and returns Through; what every replica has "
                f"needs no sum over ranks, so return Counted"
            )
    kinds = sorted({(type(part).__name__, part.unit) for part in found.values()})
    if len(kinds) > 1:
        raise ConfigError(
            f"term {function.name!r} returns {kinds} for its items; the parts of a term are added, "
            f"so all of them are of one kind and count one unit"
        )
    return dict(found)


def divisor(term: str, count: int) -> float:
    """What a term's sum is divided by; EmptySum where nothing was counted on any rank."""
    if count == 0:
        raise EmptySum(
            f"term {term!r} counted nothing in this step, on no rank, so it has no mean; give it "
            f"rows that count, or leave the step out"
        )
    return float(count)


def bent(function: Function, item: Item, part: Through, total: Tensor, count: int) -> Tensor:
    """What `then` makes of the global sum and count: one number."""
    with named(function, item):
        found = part.then(total, count)
        if not isinstance(found, Tensor) or found.dim() != 0:
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ConfigError(f"Through.then gave {shape}; a term is one number, a tensor of ()")
    return found


def numbers(step: int, rows: int, start: int = 0, stop: int | None = None) -> Tensor:
    """Global numbers of the rows of a step, or of those between two places."""
    last = rows if stop is None else stop
    return torch.arange(step * rows + start, step * rows + last)


def boxed(
    function: Function, found: Mapping[Item, Any], axes: Mapping[str, Axis], *, rows: int
) -> Any:
    """New state, as whoever asks for it is given it: a box, or one for each item."""
    thing = joined(function, found, axes)
    parts = tensors(function.name, thing, rows=rows)
    if isinstance(thing, ByItem):
        return ByItem(thing.axis, {str(item): Box(part) for item, part in parts.items()})
    return Box(parts[None])
