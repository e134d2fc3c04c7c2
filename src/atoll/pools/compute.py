"""What a rank computes by itself between two arrows: values, terms, and their gradients."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from atoll.errors import ConfigError
from atoll.pools import calls, canary, lanes, made
from atoll.pools.arrows.terms import Count, GlobalSum, Once
from atoll.pools.calls import Item
from atoll.pools.counted import Counted, Through
from atoll.pools.declared import ROWS, Function
from atoll.pools.desk import Desk


def rows(desk: Desk) -> None:
    """This rank's rows of the step and, at the first, its state."""
    index = _index(desk)
    (function,) = desk.top.of_kind("rows")
    desk.things[ROWS] = calls.called(
        function, desk.things, item=None, index=index, seed=desk.top.seed
    )
    for state in desk.top.of_kind("state"):
        if state.pool == desk.seat.pool and state.name not in desk.boxes:
            found = _over_items(desk, state)
            desk.boxes[state.name] = calls.boxed(state, found, desk.top.axes, rows=desk.num_rows)
    desk.things.update(desk.boxes)


def value(desk: Desk, function: Function) -> None:
    """Computes a value of this pool; others, here too, get it without its graph."""
    thing = calls.joined(function, _over_items(desk, function), desk.top.axes)
    desk.outputs[function.name] = calls.tensors(function.name, thing, rows=desk.num_rows)
    # What functions here add to the leaf's gradient is part of what the value gets back; the rest
    # comes over edges and is added to it.
    desk.put_leaves(function.name, desk.outputs[function.name])


def term(
    desk: Desk, function: Function, count: Count, once: Once | None, through: GlobalSum | None
) -> None:
    """A term's share on this rank, counted over its pool, and its gradient at leaves."""
    found = _over_items(desk, function)
    parts = calls.term_parts(function, found)
    _check_kind(function, parts, through)
    if desk.is_counting:
        canary.agree(desk, function, parts, unit=count.unit)
    is_counted = once is None or once.counts(desk.seat)
    own = {item: part.count if is_counted else 0 for item, part in parts.items()}
    counts = count.run(desk, own)
    coeffs = desk.lanes.of(function.name)
    if through is not None:
        total = _bent(desk, function, parts, counts, through)
        scales = through.scale(desk, coeffs)
        share = float(total.detach()) if through.speaks(desk) else 0.0
    else:
        total = _total(parts)
        scales = count.scale(desk, coeffs, function.name, counts)
        is_logged = once is None or desk.seat.is_first
        share = float(total.detach()) / count.divisor(function.name, counts) if is_logged else 0.0
    desk.losses[function.name] = function.coeff * share
    if desk.seat == desk.placement.first(desk.seat.pool):
        desk.counts[function.name] = sum(counts.values())
    if once is None or once.contributes(desk.seat):
        _term_backward(desk, function, total, scales)


def back(desk: Desk, function: Function) -> None:
    """A value's gradient goes on to what it was computed from, lane by lane."""
    outputs = {k: part for k, part in desk.outputs[function.name].items() if part.requires_grad}
    sources = _sources(desk, function)
    seeds = desk.leaf_grads[function.name]
    if desk.is_counting:
        _count_value(desk, function)
    if not outputs or not sources:
        return
    for lane in range(len(desk.lanes)):
        given = [seeds[item][lane] for item in outputs]
        if not any(bool(one.any()) for one in given):
            continue  # a gradient of zeros is zeros
        found = torch.autograd.grad(
            list(outputs.values()),
            [tensor for tensor, _ in sources],
            grad_outputs=given,
            retain_graph=True,
            allow_unused=True,
        )
        for (_, place), gradient in zip(sources, found, strict=True):
            if gradient is not None:
                place[lane].add_(gradient)


def _term_backward(desk: Desk, function: Function, total: Tensor, scales: Tensor) -> None:
    sources = _sources(desk, function)
    if desk.is_counting:
        _count_term(desk, function)
    if not total.requires_grad or not sources:
        return
    found = torch.autograd.grad(total, [tensor for tensor, _ in sources], allow_unused=True)
    for (_, place), gradient in zip(sources, found, strict=True):
        if gradient is not None:
            place.add_(lanes.spread(scales, gradient))


def _sources(desk: Desk, function: Function) -> list[tuple[Tensor, Tensor]]:
    """Each leaf that a function may have used, with the place of its gradient, [lanes, ...]."""
    found: list[tuple[Tensor, Tensor]] = []
    prefixes = tuple(f"{prefix}." for prefix in desk.prefixes(function))
    for name, parameter in desk.trained.items():
        if name.startswith(prefixes):
            found.append((parameter, desk.param_grads[name]))
    for name in function.asks:
        if name in desk.leaves:
            grads = desk.leaf_grads[name]
            found.extend((leaf, grads[item]) for item, leaf in desk.leaves[name].items())
    return found


def _total(parts: Mapping[Item, Counted | Through]) -> Tensor:
    first, *rest = parts.values()
    total = first.total
    for part in rest:
        total = total + part.total
    return total


def _check_kind(
    function: Function, parts: Mapping[Item, Counted | Through], through: GlobalSum | None
) -> None:
    """A term that is now one, now the other, has no plan."""
    found = {type(part).__name__ for part in parts.values()}
    wanted = "Counted" if through is None else "Through"
    if found != {wanted}:
        raise ConfigError(
            f"term {function.name!r} returned {sorted(found)} here and {wanted} when its plan was "
            f"made; return one kind, whatever the rows are"
        )


def _bent(
    desk: Desk,
    function: Function,
    parts: Mapping[Item, Counted | Through],
    counts: Mapping[Item, int],
    through: GlobalSum,
) -> Tensor:
    bent = []
    for micro, (item, part) in enumerate(parts.items()):
        assert isinstance(part, Through), part
        total = through.run(desk, part.total, micro)
        bent.append(calls.bent(function, item, part, total, counts[item]))
    return torch.stack(bent).sum()


def _over_items(desk: Desk, function: Function) -> dict[Item, Any]:
    return calls.over_items(
        function, desk.things, here=desk.items, index=_index(desk), seed=desk.top.seed
    )


def _index(desk: Desk) -> Tensor:
    rows = desk.seat.rows
    return calls.numbers(desk.step, desk.top.num_rows, rows.start, rows.stop)


# Rows that gradients are over: what a canary counts


def _count_term(desk: Desk, function: Function) -> None:
    at = desk.terms.index(function.name)
    for item in calls.items(function, desk.items):
        counts = torch.zeros(len(desk.terms), desk.num_rows, dtype=torch.int64)
        counts[at] = 1
        _count_call(desk, function, item, counts, is_once=function.once)


def _count_value(desk: Desk, function: Function) -> None:
    """What came with a value's gradient goes on with it."""
    came = desk.leaf_counts[function.name]
    for item in calls.items(function, desk.items):
        whole = torch.stack(list(came.values())).sum(0)
        _count_call(desk, function, item, whole if item is None else came[item])


def _count_call(
    desk: Desk, function: Function, item: Item, counts: Tensor, *, is_once: bool = False
) -> None:
    """One call's rows are in the gradient of all that it was given."""
    for name in function.asks:
        if name in desk.leaves:
            axis = desk.trace.values[name].axis
            for part in calls.given(function, item, axis, list(desk.leaves[name])):
                desk.leaf_counts[name][part] += counts
    whole = counts[:, 0] if is_once else counts.sum(1)  # what has no rows counts as one
    for name, part in desk.modules:
        axis = desk.top.functions[name].axis
        if name in function.asks and part in calls.given(function, item, axis, [part]):
            desk.param_counts[made.prefix((name, part))] += whole
