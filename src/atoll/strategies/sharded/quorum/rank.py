"""One rank of a group that commits by quorum: owner, engine, steps, and with the first a leader."""

import logging
from collections.abc import Callable, Iterator
from typing import Protocol

from torch import nn

from atoll.clock import Clock
from atoll.collectives import schedule
from atoll.collectives.base import Collectives
from atoll.collectives.exchange import Runner
from atoll.collectives.mailbox import Bytes
from atoll.collectives.peers import Peers, Source
from atoll.collectives.runners import Threaded
from atoll.errors import GroupBroken, NotReady
from atoll.strategies.sharded.budget import Budget
from atoll.strategies.sharded.commit import LEADER, Outcome
from atoll.strategies.sharded.engine import Engine
from atoll.strategies.sharded.quorum import messages
from atoll.strategies.sharded.quorum.exchange import Lanes, QuorumExchange
from atoll.strategies.sharded.quorum.leader import Leader
from atoll.strategies.sharded.quorum.owner import Owner
from atoll.strategies.sharded.quorum.settings import Settings
from atoll.strategies.sharded.quorum.step import QuorumStep
from atoll.strategies.sharded.shard import Shard

log = logging.getLogger(__name__)

Spawn = Callable[[str, Callable[[], None]], object]


class Lane(Runner, Protocol):
    """A runner that can be closed, such as those of `collectives.runners`."""

    def close(self) -> None: ...


class Reception:
    """Fulfils `peers.Desk` and `peers.Source` from the moment a group is entered.

    Its owner comes later, when the rank has restored its shard; until then callers are told to call
    again. Names that are no parameters are read from `files`.
    """

    def __init__(self, files: Source | None = None) -> None:
        self._files = files
        self._owner: Owner | None = None

    def open(self, owner: Owner) -> None:
        """From now on `owner` answers."""
        self._owner = owner

    def answer(self, sender: int, name: str, body: Bytes) -> bytes:
        return self._desk().answer(sender, name, body)

    def read(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        if self._files is not None and not name.startswith(messages.PARAMETERS + "/"):
            return self._files.read(name, start, stop)
        return self._desk().read(name, start, stop)

    def _desk(self) -> Owner:
        if self._owner is None:
            raise NotReady("this rank has not restored its shard yet; call again")
        return self._owner


class QuorumRank:
    """Owner, engine and steps of one rank, until `close`. Its training thread uses `steps`."""

    def __init__(
        self,
        model: nn.Module,
        shard: Shard,
        peers: Peers,
        reception: Reception,
        settings: Settings,
        *,
        clock: Clock,
        spawn: Spawn,
        lane: Callable[[str], Lane] = Threaded,
        told: Callable[[Outcome], None] = lambda _: None,
        may_fold: Callable[[int], bool] = lambda _: True,
        shield: Callable[[Collectives], Collectives] = lambda exchange: exchange,
        limit_bytes: int | None = None,
    ) -> None:
        """`told` hears of every step that is committed, and `may_fold` is asked: see `Owner`.

        `spawn` runs the leader beside the first rank's training; `lane` carries messages; `shield`
        is put between the passes and what they wait for.
        """
        self._peers = peers
        self.owner = Owner(
            shard,
            group=settings.group,
            version=settings.version,
            trains=lambda name: model.get_parameter(name).requires_grad,
            micro_batches=settings.micro_batches,
            rule=settings.rule,
            clock=clock,
            limit_bytes=limit_bytes,
            told=told,
            may_fold=may_fold,
        )
        held = {"bytes": self.owner.accumulator.limit_bytes}
        log.info("gradients of all ranks wait at their owners until they are committed", extra=held)
        others = schedule.others(peers.rank, peers.size)
        made = {
            kind: {k: lane(f"{kind}-{peers.rank}-{k}") for k in others}
            for kind in ("push", "pull", *(("lead",) if peers.rank == LEADER else ()))
        }
        self._lanes = [one for lanes in made.values() for one in lanes.values()]
        exchange = QuorumExchange(
            peers,
            self.owner,
            group=settings.group,
            lanes=Lanes(made["push"], made["pull"]),
            flying=int(Budget.of(shard.units, shard.size).reduces),
        )
        self.engine = Engine(
            model,
            shard,
            shield(exchange),
            group=settings.group,
            clock=clock,
            computes=settings.computes,
        )
        policy = settings.policy
        self.steps = QuorumStep(
            self.engine,
            settings.rule,
            exchange=exchange,
            owner=self.owner,
            deadline_seconds=policy.deadline_seconds,
        )
        reception.open(self.owner)
        self._leader: Leader | None = None
        if peers.rank == LEADER:
            self._leader = Leader(
                self.owner,
                peers,
                group=settings.group,
                policy=policy,
                clock=clock,
                lanes=made["lead"],
            )
            spawn("leader", self._leader.run)

    def abort(self, error: Exception) -> None:
        """The group is over: whoever waits raises `error`."""
        self.owner.abort(error)
        self._peers.abort(error)

    def close(self) -> None:
        """Leaves: what is under way is given up. The shard is the caller's again.

        A step that the others are just being told of is told to all of them first.
        """
        try:
            if self._leader is not None:
                self._leader.settle()
        finally:
            self.abort(GroupBroken("this rank has left its group"))
        self.engine.close()
        for lane in self._lanes:
            lane.close()
