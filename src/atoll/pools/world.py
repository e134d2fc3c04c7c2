"""A topology that is ready to train: planned, checked on paper, its first weights made."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import Tensor

from atoll.collectives.base import Collectives
from atoll.errors import ConfigError
from atoll.pools import handing, made, plan_checks, threads
from atoll.pools.engine import Engine
from atoll.pools.plan import planned
from atoll.pools.topology import Topology
from atoll.pools.trace import Trace, traced

T = TypeVar("T")
CANARY_EVERY = 50  # steps; one with it costs about a backward pass for each term more


class World:
    """What all ranks of a topology agree on.

    `weights` and `trace` are made here unless another process gives them: weights are handed out as
    bytes (`over`), never made twice from a seed.
    """

    def __init__(
        self,
        top: Topology,
        *,
        weights: Mapping[str, Tensor] | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.weights = made.initial(top) if weights is None else weights
        self.trace = traced(top, self.weights) if trace is None else trace
        self.plan = planned(top, self.trace)
        self.coverage = plan_checks.check(self.plan)

    @classmethod
    def over(cls, top: Topology, group: Collectives) -> "World":
        """The same world on every rank of `group`, with what rank 0 makes; all of them call it."""
        weights, trace = handing.handed_out(top, group)
        return cls(top, weights=weights, trace=trace)

    @property
    def size(self) -> int:
        """How many ranks it takes."""
        return self.plan.placement.size

    def engine(self, group: Collectives, *, canary_every: int = CANARY_EVERY) -> Engine:
        """This process's rank of the world; all ranks of `group` call it."""
        if group.size != self.size:
            raise ConfigError(
                f"the group has {group.size} ranks and the topology's pools {self.plan.top.size} "
                f"take {self.size}; start as many"
            )
        groups = threads.groups(self.plan.placement, group)
        return self._engine(group.rank, groups, canary_every)

    def on_threads(
        self, work: Callable[[Engine], T], *, canary_every: int = CANARY_EVERY
    ) -> list[T]:
        """What `work` returns on each rank, all of them threads of this process."""
        return threads.on_threads(
            self.plan.placement,
            lambda rank, groups: work(self._engine(rank, groups, canary_every)),
        )

    def trained(self, engine: Engine) -> dict[str, Tensor]:
        """All weights as they are now, on every rank; all of them call it, once after a step."""
        return handing.brought_together(engine, self.weights)

    def _engine(self, rank: int, groups: Mapping[str, Collectives], canary_every: int) -> Engine:
        return Engine(
            self.plan,
            groups,
            self.weights,
            rank=rank,
            coverage=self.coverage,
            canary_every=canary_every,
        )
