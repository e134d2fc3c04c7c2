"""The declaration: which pools there are, and which functions make up the loss.

Owns the names and what may stand where. Knows nothing of ranks at work: sizes are placement, and
`sized` moves the same functions to others.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from atoll.errors import ConfigError
from atoll.pools import declared
from atoll.pools.declared import DRAW, INDEX, ROWS, Axis, Function, Kind, Pool

F = TypeVar("F", bound=Callable[..., Any])
Size = int | tuple[int, int]  # ranks, or (blocks, ranks of each)
# Words that functions ask for, the group of all ranks, and the lane of all terms together.
RESERVED = (ROWS, DRAW, INDEX, "world", "all")


class Topology:
    """Pools of ranks and the functions that they compute.

    Each function is written once and gets rows, values, parameters, kept state and noise by name,
    never a rank, a size or a group. `rows` are those of one step, `wire` what values and gradients
    between pools are rounded to in production; a check sends them as they are.
    """

    def __init__(self, *, rows: int, seed: int = 0, wire: torch.dtype | None = None) -> None:
        self.num_rows = declared.check_size("rows", rows)
        if wire is not None and not wire.is_floating_point:
            raise ConfigError(f"wire={wire} holds no fractions; give a floating dtype, or None")
        self.seed = seed
        self.wire = wire
        self.pools: dict[str, Pool] = {}
        self.axes: dict[str, Axis] = {}
        self.functions: dict[str, Function] = {}  # by name, as declared; of rows under ROWS
        self.sizes: list[dict[str, Size]] = []  # other sizes that a check goes through

    # Declaring

    def pool(self, name: str, *, ranks: int, blocks: int = 1) -> Pool:
        """A pool of `blocks` times `ranks` ranks."""
        self._check_new(name)
        pool = Pool(
            name, declared.check_size("ranks", ranks), declared.check_size("blocks", blocks)
        )
        self.pools[name] = pool
        return pool

    def axis(self, name: str, items: Sequence[str], *, over: Pool) -> Axis:
        """Items that the blocks of `over` share out."""
        self._check_new(name)
        self._check_pool(over)
        declared.check_items(name, items)
        self._check_before_functions(name, over)
        taken = [axis.name for axis in self.axes.values() if axis.over == over.name]
        if taken or len(set(items)) != len(items) or not items:
            raise ConfigError(
                f"axis {name!r} over pool {over.name!r} has items {list(items)} and the pool has "
                f"axes {taken}; a pool shares out one axis, whose items are all different"
            )
        self.axes[name] = Axis(name, tuple(items), over.name)
        return self.axes[name]

    def rows(self, call: F) -> F:
        """Of what a step is made: called with the global numbers of its rows, and a draw."""
        return self._declare("rows", call, name=ROWS)

    def parameters(self, *, owner: Pool) -> Callable[[F], F]:
        """A module that `owner` keeps and steps; with an axis one for each item."""
        return lambda call: self._declare("parameters", call, pool=owner)

    def value(self, *, on: Pool) -> Callable[[F], F]:
        """A tensor [rows, ...], or one for each item, that travels to whoever asks for it."""
        return lambda call: self._declare("value", call, pool=on)

    def state(self, *, on: Pool) -> Callable[[F], F]:
        """Tensors by row, made at the first step; whoever asks may change them; never reduced."""
        return lambda call: self._declare("state", call, pool=on)

    def term(self, *, on: Pool, coeff: float = 1.0, once: bool = False) -> Callable[[F], F]:
        """A term of the loss: Counted or Through; with `once` it is the same on every replica."""
        return lambda call: self._declare("term", call, pool=on, coeff=coeff, once=once)

    def also_at(self, **sizes: Size) -> None:
        """Other sizes at which `atoll gradcheck` checks this file, too."""
        self.sized(**sizes)  # refused here, if at all
        self.sizes.append(dict(sizes))

    # Asking

    def of_kind(self, kind: Kind) -> list[Function]:
        """As declared."""
        return [function for function in self.functions.values() if function.kind == kind]

    def sized(self, **sizes: Size) -> "Topology":
        """The same declaration at other sizes: `sized(ci=3, layers=(2, 1))`, blocks by ranks."""
        unknown = sorted(set(sizes) - set(self.pools))
        if unknown:
            raise ConfigError(f"sizes name {unknown}; the pools are {sorted(self.pools)}")
        found = self._copied(rows=self.num_rows, wire=self.wire)
        for name, pool in self.pools.items():
            given = sizes.get(name, (pool.blocks, pool.ranks))
            if isinstance(given, tuple) and len(given) != 2:
                raise ConfigError(f"size {name}={given} is neither ranks nor (blocks, ranks)")
            blocks, ranks = given if isinstance(given, tuple) else (pool.blocks, given)
            del found.pools[name]  # so that they stay in order
            found.pool(name, ranks=ranks, blocks=blocks)
        return found

    def with_rows(self, rows: int) -> "Topology":
        """The same declaration with other steps."""
        return self._copied(rows=rows, wire=self.wire)

    def with_wire(self, wire: torch.dtype | None) -> "Topology":
        """The same declaration with values and gradients rounded to another dtype, or to none."""
        return self._copied(rows=self.num_rows, wire=wire)

    def _copied(self, *, rows: int, wire: torch.dtype | None) -> "Topology":
        found = Topology(rows=rows, seed=self.seed, wire=wire)
        found.pools = dict(self.pools)
        found.axes, found.functions = dict(self.axes), dict(self.functions)
        found.sizes = list(self.sizes)
        return found

    @property
    def size(self) -> dict[str, Size]:
        """Of each pool."""
        return {
            name: pool.ranks if pool.blocks == 1 else (pool.blocks, pool.ranks)
            for name, pool in self.pools.items()
        }

    @property
    def written_in(self) -> str | None:
        """The module of its functions, which other processes load; None while there are none."""
        found = [function.call.__module__ for function in self.functions.values()]
        return found[0] if found else None

    def axis_over(self, pool: str) -> Axis | None:
        """What a pool's blocks share out."""
        return next((axis for axis in self.axes.values() if axis.over == pool), None)

    # What may stand where

    def _declare(
        self,
        kind: Kind,
        call: F,
        *,
        name: str | None = None,
        pool: Pool | None = None,
        coeff: float = 1.0,
        once: bool = False,
    ) -> F:
        name = name or declared.name_of(call)
        declared.check_coeff(name, coeff)
        if kind != "rows" or name in self.functions:
            self._check_new(name)
        if pool is not None:
            self._check_pool(pool)
        asks = declared.asked(call)
        axis = declared.axis_of(call, asks, list(self.axes))
        function = Function(kind, name, call, asks, pool.name if pool else "", axis, coeff, once)
        self._check_asks(function)
        self._check_axis(function)
        self.functions[name] = function
        return call

    def _check_new(self, name: str) -> None:
        declared.check_name(name)
        known = [*RESERVED, *self.pools, *self.axes, *self.functions]
        if name in known:
            raise ConfigError(
                f"{name!r} is declared twice, or is a word of its own; names in use: {known}"
            )

    def _check_pool(self, pool: Pool) -> None:
        if self.pools.get(pool.name) != pool:
            raise ConfigError(
                f"pool {pool.name!r} is not of this topology; its pools are {sorted(self.pools)}"
            )

    def _check_before_functions(self, axis: str, pool: Pool) -> None:
        early = [one.name for one in self.functions.values() if one.pool == pool.name]
        if early:
            raise ConfigError(
                f"axis {axis!r} is declared after {early} of pool {pool.name!r}, which could not "
                f"ask for it; declare a pool's axis before its functions"
            )

    def _check_asks(self, function: Function) -> None:
        allowed = _ALLOWED[function.kind]
        if function.once:
            allowed = {"parameters"}  # nothing that differs between the replicas
        known = {one.name: one.kind for one in self.functions.values() if one.kind != "rows"}
        words = {"rows": (INDEX, DRAW), "parameters": ()}.get(function.kind, (ROWS, DRAW))
        if function.once:
            words = ()
        axes = () if function.kind == "rows" else self.axes  # rows are of no item
        may = [*words, *axes, *(name for name, kind in known.items() if kind in allowed)]
        unknown = [name for name in function.asks if name not in may]
        if unknown:
            raise ConfigError(
                f"{function.kind} {function.name!r} asks for {unknown}; "
                f"{'with once=True it' if function.once else 'it'} may ask for {may}, declared "
                f"before it"
            )
        self._check_states(function)

    def _check_states(self, function: Function) -> None:
        for name in function.asks:
            asked = self.functions.get(name)
            if asked is not None and asked.kind == "state" and asked.pool != function.pool:
                raise ConfigError(
                    f"{function.kind} {function.name!r} on pool {function.pool!r} asks for state "
                    f"{name!r} of pool {asked.pool!r}; state never leaves its rank, so ask for it "
                    f"where it is kept"
                )

    def _check_axis(self, function: Function) -> None:
        axis = self.axis_over(function.pool)
        if axis is not None and function.axis != axis.name:
            raise ConfigError(
                f"{function.kind} {function.name!r} is on pool {function.pool!r}, whose blocks "
                f"share out axis {axis.name!r}, and does not ask for it; ask for {axis.name!r}, or "
                f"each block would have other items under one name"
            )


_ALLOWED: Mapping[Kind, set[Kind]] = {
    "rows": set(),
    "parameters": set(),
    "state": set(),
    "value": {"parameters", "value"},
    "term": {"parameters", "value", "state"},
}
