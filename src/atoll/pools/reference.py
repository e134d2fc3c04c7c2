"""The loss in one process: each function called once on all rows, and plain autograd.

Imports nothing of plan, arrows or engine: what ranks compute is compared with this.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atoll.layout import Span
from atoll.pools import calls, made
from atoll.pools.calls import Box, ByItem, Item
from atoll.pools.counted import Counted, Through
from atoll.pools.declared import ROWS, Function
from atoll.pools.topology import Topology

Grads = dict[str, Tensor]  # by tensor


@dataclass(frozen=True, slots=True)
class Term:
    """A term over some rows: its parts by item, and what they add up to."""

    function: Function
    parts: Mapping[Item, Counted | Through]

    @property
    def count(self) -> int:
        return sum(part.count for part in self.parts.values())

    def loss(self) -> Tensor:
        """Without its coefficient: the mean, or what `then` makes of the sums.

        EmptySum where a mean is over nothing.
        """
        means = [part for part in self.parts.values() if isinstance(part, Counted)]
        if means:
            total = means[0].total
            for part in means[1:]:
                total = total + part.total
            return total / calls.divisor(self.function.name, self.count)
        bent = [
            calls.bent(self.function, item, part, part.total, part.count)
            for item, part in self.parts.items()
            if isinstance(part, Through)
        ]
        return torch.stack(bent).sum()


class Reference:
    """One process that has all rows, all items, all parameters and all state."""

    def __init__(self, top: Topology, weights: Mapping[str, Tensor]) -> None:
        self.top = top
        self.modules = made.modules(top, made.everywhere(top))
        made.fill(self.modules, weights)
        self.boxes: dict[str, Any] = {}
        self._here = {axis.name: axis.items for axis in top.axes.values()}

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """What is trained, by name."""
        return dict(made.trained(self.modules))

    def step(self, step: int) -> dict[str, Term]:
        """The terms of a step; kept state is changed by them."""
        index = calls.numbers(step, self.top.num_rows)
        if not self.boxes and self.top.of_kind("state"):
            self.boxes = self._made_boxes(index)
        return self._terms(index, self.boxes)

    def part(self, step: int, rows: Span, names: Sequence[str] | None = None) -> dict[str, Term]:
        """The same terms over a part of a step's rows; nothing is changed."""
        index = calls.numbers(step, self.top.num_rows, rows.start, rows.stop)
        if not self.boxes:
            return self._terms(index, self._made_boxes(index), names)
        return self._terms(index, {k: _cut(box, rows) for k, box in self.boxes.items()}, names)

    def grads(self, loss: Tensor) -> Grads:
        """Of one loss by every trained tensor that leads to it."""
        trained = self.trained()
        if not loss.requires_grad:
            return {}
        found = torch.autograd.grad(
            loss, list(trained.values()), retain_graph=True, allow_unused=True
        )
        return {name: grad for name, grad in zip(trained, found, strict=True) if grad is not None}

    def values(self, step: int) -> dict[str, Any]:
        """All values of a step, for their shapes."""
        return self._things(calls.numbers(step, self.top.num_rows))

    def _terms(
        self, index: Tensor, boxes: Mapping[str, Any], names: Sequence[str] | None = None
    ) -> dict[str, Term]:
        given = {**self._things(index), **boxes}
        found: dict[str, Term] = {}
        for function in self.top.of_kind("term"):
            if names is not None and function.name not in names:
                continue
            parts = self._over_items(function, given, index)
            found[function.name] = Term(function, calls.term_parts(function, parts))
        return found

    def _things(self, index: Tensor) -> dict[str, Any]:
        given = made.things(self.modules, self.top.of_kind("parameters"))
        for function in self.top.of_kind("rows"):
            (given[ROWS],) = self._over_items(function, given, index).values()
        for function in self.top.of_kind("value"):
            parts = self._over_items(function, given, index)
            given[function.name] = calls.joined(function, parts, self.top.axes)
            calls.tensors(function.name, given[function.name], rows=len(index))
        return given

    def _made_boxes(self, index: Tensor) -> dict[str, Any]:
        given = self._things(index)
        found: dict[str, Any] = {}
        for function in self.top.of_kind("state"):
            parts = self._over_items(function, given, index)
            found[function.name] = calls.boxed(function, parts, self.top.axes, rows=len(index))
        return found

    def _over_items(
        self, function: Function, given: Mapping[str, Any], index: Tensor
    ) -> dict[Item, Any]:
        return calls.over_items(function, given, here=self._here, index=index, seed=self.top.seed)


def _cut(box: Any, rows: Span) -> Any:
    """A copy of some rows' state."""
    if isinstance(box, ByItem):
        return ByItem(box.axis, {item: _cut(one, rows) for item, one in box.items()})
    return Box(copy.deepcopy(box.value[rows.start : rows.stop]))
