"""Shapes that only a call can tell: of the values that travel, and which terms are Through."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atoll.errors import ConfigError
from atoll.pools import calls, made
from atoll.pools.calls import ByItem, Item
from atoll.pools.counted import Through
from atoll.pools.declared import ROWS
from atoll.pools.topology import Topology
from atoll.pools.watched import Watched


@dataclass(frozen=True, slots=True)
class Spec:
    """A value's shape without its rows, by item."""

    axis: str | None
    shapes: Mapping[Item, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Trace:
    """What one call of everything in one process has shown."""

    values: Mapping[str, Spec]
    through: tuple[str, ...]  # terms

    def to_json(self) -> dict[str, Any]:
        """For other processes."""
        return {
            "values": {
                name: {"axis": spec.axis, "shapes": [[k, list(s)] for k, s in spec.shapes.items()]}
                for name, spec in self.values.items()
            },
            "through": list(self.through),
        }

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "Trace":
        """What `to_json` gave."""
        return cls(
            {
                name: Spec(spec["axis"], {k: tuple(shape) for k, shape in spec["shapes"]})
                for name, spec in told["values"].items()
            },
            tuple(told["through"]),
        )


def traced(top: Topology, weights: Mapping[str, Tensor] | None = None) -> Trace:
    """Calls every function once, on the first step's rows."""
    if ROWS not in top.functions or not top.of_kind("term"):
        raise ConfigError(
            f"the topology declares {sorted(top.functions)}; it needs @top.rows, which makes a "
            f"step's rows, and one @top.term at least"
        )
    reference = Watched(top, made.initial(top) if weights is None else weights)
    terms = reference.step(0)
    with torch.no_grad():
        for term in terms.values():
            term.loss()  # what `then` gives is refused here, too
        things = reference.values(0)
    values = {
        function.name: _spec(function.name, things[function.name], top.num_rows)
        for function in top.of_kind("value")
    }
    through = [
        name for name, term in terms.items() if isinstance(next(iter(term.parts.values())), Through)
    ]
    return Trace(values, tuple(through))


def _spec(name: str, thing: Any, rows: int) -> Spec:
    parts = calls.tensors(name, thing, rows=rows)
    axis = thing.axis if isinstance(thing, ByItem) else None
    return Spec(axis, {item: tuple(part.shape[1:]) for item, part in parts.items()})
