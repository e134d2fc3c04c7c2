"""What one rank has on its desk in a step: modules, values, leaves and the gradients so far.

Arrows read from it and write to it; nothing here talks to other ranks.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from atoll.collectives.base import Collectives, Key
from atoll.pools import made
from atoll.pools.calls import ByItem, Item
from atoll.pools.declared import Function
from atoll.pools.lanes import Lanes
from atoll.pools.made import Modules
from atoll.pools.placement import WORLD, Placement, Seat
from atoll.pools.topology import Topology
from atoll.pools.trace import Trace

GROUP = 1  # all messages of a world are of one group of ranks

Parts = dict[Item, Tensor]  # of a value


class Desk:
    """One rank's own memory; `groups` are its collectives by name."""

    def __init__(
        self,
        placement: Placement,
        trace: Trace,
        seat: Seat,
        groups: Mapping[str, Collectives],
        modules: Modules,
    ) -> None:
        self.placement = placement
        self.top: Topology = placement.top
        self.trace = trace
        self.seat = seat
        self.groups = groups
        self.modules = modules
        self.items = placement.items(seat)
        self.boxes: dict[str, Any] = {}
        self.trained: dict[str, nn.Parameter] = dict(made.trained(modules))
        # What this rank keeps and steps; the rest is borrowed.
        kept = {key: one for key, one in modules.items() if self._is_own(key[0])}
        self.owned: dict[str, nn.Parameter] = dict(made.trained(kept))
        self.terms = [function.name for function in self.top.of_kind("term")]
        self.begin(0, Lanes({}))

    def _is_own(self, name: str) -> bool:
        return self.top.functions[name].pool == self.seat.pool

    def begin(self, step: int, lanes: Lanes, *, is_counting: bool = False) -> None:
        """An empty desk for a step; modules and kept state stay."""
        self.step = step
        self.lanes = lanes
        self.is_counting = is_counting  # whether a canary crosses with the gradients
        self.things: dict[str, Any] = made.things(self.modules, self.top.of_kind("parameters"))
        self.outputs: dict[str, Parts] = {}  # values computed here, with their graph
        self.leaves: dict[str, Parts] = {}  # values as functions here are given them
        self.leaf_grads: dict[str, Parts] = {}  # [lanes, rows, ...]
        self.leaf_counts: dict[str, Parts] = {}  # [terms, rows]: which rows of which terms
        self.param_grads: dict[str, Tensor] = {
            name: torch.zeros((len(lanes), *parameter.shape), dtype=parameter.dtype)
            for name, parameter in self.trained.items()
        }
        # Rows of each term that a module's gradients are over, [terms], by module.
        self.param_counts: dict[str, Tensor] = {
            made.prefix(key): torch.zeros(len(self.terms), dtype=torch.get_default_dtype())
            for key in self.modules
        }
        self.losses: dict[str, float] = {}  # this rank's share of what is logged
        self.counts: dict[str, int] = {}  # of all ranks, known to the producing pool

    @property
    def world(self) -> Collectives:
        return self.groups[WORLD]

    @property
    def num_rows(self) -> int:
        return len(self.seat.rows)

    def key(self, unit: int, micro: int = 0) -> Key:
        """Which exchange of this step an arrow's is."""
        return Key(group=GROUP, step=self.step + 1, op="reduce", micro=micro, unit=unit)

    def prefixes(self, function: Function) -> Sequence[str]:
        """Of the modules that a function asks for and that are here."""
        return [made.prefix(key) for key in self.modules if key[0] in function.asks]

    def put_leaves(self, name: str, parts: Parts) -> None:
        """Values as functions here get them: cut off from whoever made them."""
        axis = self.trace.values[name].axis
        leaves = {item: part.detach().requires_grad_() for item, part in parts.items()}
        self.leaves[name] = leaves
        self.leaf_grads[name] = {
            item: torch.zeros((len(self.lanes), *part.shape), dtype=part.dtype)
            for item, part in leaves.items()
        }
        self.leaf_counts[name] = {
            item: torch.zeros(len(self.terms), self.num_rows, dtype=torch.int64) for item in leaves
        }
        given: Any = leaves.get(None)
        if axis is not None:
            given = ByItem(axis, {str(item): leaf for item, leaf in leaves.items()})
        self.things[name] = given
