"""A training thread's side of a quorum: it pulls weights from owners and pushes gradients to them.

Fulfils `Collectives` for the engine's gathers. Gradients are taken by `push`, because their sum is
nobody's until the step is committed.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from atoll.collectives import memory, schedule
from atoll.collectives.base import Collectives, Handle, Key, Label
from atoll.collectives.codecs import WireCodec
from atoll.collectives.exchange import Runner
from atoll.collectives.peers import ASK_BYTES, Peers
from atoll.errors import AtollError, ConfigError
from atoll.strategies.sharded import accumulator
from atoll.strategies.sharded.accumulator import COUNTED
from atoll.strategies.sharded.quorum import messages
from atoll.strategies.sharded.quorum.owner import Owner
from atoll.sums.partial import PartialSum


@dataclass(frozen=True)
class Lanes:
    """What carries a rank's pushes and its pulls to and from each peer, in order."""

    pushes: Mapping[int, Runner]
    pulls: Mapping[int, Runner]


class QuorumExchange:
    """Fulfils `collectives.base.Collectives` for the training thread of one rank."""

    def __init__(
        self, peers: Peers, owner: Owner, *, group: int, lanes: Lanes, flying: int = 1
    ) -> None:
        """`flying` gradients of units are on their way while the next one is computed."""
        self.rank = peers.rank
        self.size = peers.size
        self._peers = peers
        self._owner = owner
        self._group = group
        self._lanes = lanes
        self._most = flying
        self._flying: deque[tuple[Tensor, Handle]] = deque()
        self._error: AtollError | None = None
        self.version = 0  # of the weights that are gathered
        self.step = self.micro = self.tokens = 0  # of the gradients that are pushed

    @property
    def nbytes(self) -> int:
        """Of gradients that are on their way."""
        return sum(gradient.nbytes for gradient, _ in self._flying)

    # Weights

    def all_gather(
        self,
        key: Key,
        shard: Tensor,
        out: Tensor,
        *,
        codec: WireCodec | None = None,
    ) -> Handle:
        """`out` becomes the unit's weights of `version`, as their owners have it.

        `shard` is not read: the owner may step it meanwhile.
        """
        if codec is not None:
            raise ConfigError(
                f"parameters travel as {codec.name!r}, and commit = 'quorum' pulls them as they "
                f"are computed with; set sharded.parameters = 'fp32', or commit = 'strict'"
            )
        parts, version = schedule.cut(len(out), self.size), self.version
        self._owner.copy(key.unit, version, parts[self.rank].of(out))
        return _All(
            [
                self._lanes.pulls[k].begin(self._pulling(k, key.unit, version, parts[k].of(out)))
                for k in schedule.others(self.rank, self.size)
                if len(parts[k])
            ]
        )

    def _pulling(self, rank: int, unit: int, version: int, out: Tensor) -> Callable[[], None]:
        name = messages.parameters_name(self._group, version, unit, out.dtype)

        def pull() -> None:
            place, at = memory.bytes_of(out), 0
            for piece in self._peers.read(rank, name, 0, len(place)):
                place[at : at + len(piece)] = piece
                at += len(piece)

        return pull

    # Gradients

    def push(self, unit: int, gradient: Tensor) -> None:
        """Sends each owner its part; waits while too many are on their way.

        An error is kept for `settle`: autograd calls this, where nobody expects one.
        """
        if self._error is not None:
            return
        key = Key(self._group, self.step, "reduce", self.micro, unit)
        try:
            self._owner.check(self.step)
            self._flying.append((gradient, self._pushed(key, gradient)))
        except AtollError as error:
            self._error = error
        self._settle(leaving=self._most)

    def _pushed(self, key: Key, gradient: Tensor) -> Handle:
        parts = schedule.cut(len(gradient), self.size)
        elements = ASK_BYTES // gradient.element_size()
        per_rank: dict[int, list[tuple[Label, PartialSum]]] = {
            k: [
                (Label(key, 0, piece), PartialSum(piece.of(gradient), self.tokens, COUNTED))
                for piece in schedule.chunks(part, elements)
            ]
            for k, part in enumerate(parts)
        }
        return self._sent(per_rank)

    def send_totals(self, micros: Sequence[tuple[float, int]], *, lr: float) -> None:
        """Says (summed loss, tokens) of each micro-batch: this rank has computed all of the step.

        Returns once all that it pushed is with its owners; raises what went wrong since the step
        began, StaleContribution where it is over.
        """
        self.settle()
        said = [
            accumulator.totals(self._group, self.step, k, loss_sum=loss_sum, lr=lr, tokens=tokens)
            for k, (loss_sum, tokens) in enumerate(micros)
        ]
        self._sent({k: said for k in range(self.size)}).wait()

    def meet(self, step: int, *, seconds: float) -> None:
        """Returns once all ranks have come to the end of the round whose last step it is."""
        name = messages.reached_name(self._group, step)

        def telling(rank: int) -> Callable[[], None]:
            return lambda: void(self._peers.ask(rank, name))

        told = _All([lane.begin(telling(k)) for k, lane in self._lanes.pushes.items()])
        self._owner.reach(self.rank, step)
        told.wait()
        self._owner.wait_met(step, seconds=seconds)

    def _sent(self, parts: Mapping[int, Sequence[tuple[Label, PartialSum]]]) -> Handle:
        others = [
            self._lanes.pushes[k].begin(self._telling(k, parts[k]))
            for k in schedule.others(self.rank, self.size)
            if parts[k]
        ]
        for label, part in parts[self.rank]:
            self._owner.add(label, self.rank, part)
        return _All(others)

    def _telling(self, rank: int, parts: Sequence[tuple[Label, PartialSum]]) -> Callable[[], None]:
        def tell() -> None:
            for label, part in parts:
                name = messages.add_name(label, part.count)
                self._peers.ask(rank, name, memory.bytes_of(part.total))

        return tell

    def settle(self) -> None:
        """Returns once nothing is on its way; raises the first thing that went wrong."""
        self._settle(leaving=0)
        if self._error is not None:
            raise self._error

    def forget(self) -> None:
        """The step is given up: what was on its way has arrived, or never will."""
        self._settle(leaving=0)
        self._error = None

    def _settle(self, *, leaving: int) -> None:
        while len(self._flying) > leaving:
            _, handle = self._flying.popleft()
            try:
                handle.wait()
            except AtollError as error:
                self._error = self._error or error

    # The rest is the group's

    def reduce_scatter(
        self,
        key: Key,
        values: Tensor,
        out: Tensor,
        *,
        codec: WireCodec | None = None,
        residual: Tensor | None = None,
    ) -> Handle:
        """Refused: a quorum's sums are known at the end of a step alone."""
        raise ConfigError(f"{key}: gradients of a quorum are pushed to their owners, not reduced")

    def all_reduce(self, key: Key, values: Tensor, *, codec: WireCodec | None = None) -> Handle:
        return self._peers.all_reduce(key, values, codec=codec)

    def broadcast(self, key: Key, values: Tensor, *, source: int) -> Handle:
        return self._peers.broadcast(key, values, source=source)

    def exchange(self, key: Key, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        return self._peers.exchange(key, parts, sizes)

    def all_gather_bytes(self, key: Key, data: bytes, *, limit: int) -> list[bytes]:
        return self._peers.all_gather_bytes(key, data, limit=limit)

    def barrier(self, key: Key) -> Handle:
        return self._peers.barrier(key)

    def send(self, key: Key, values: Tensor, *, to: int) -> Handle:
        return self._peers.send(key, values, to=to)

    def receive(self, key: Key, out: Tensor, *, source: int) -> Handle:
        return self._peers.receive(key, out, source=source)

    def subgroups(self, members: Sequence[Sequence[int]]) -> list[Collectives | None]:
        return self._peers.subgroups(members)

    def abort(self, error: Exception) -> None:
        self._owner.abort(error)
        self._peers.abort(error)


class _All:
    """Done when all of them are; memory that one of them writes to is free only then."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles

    def wait(self) -> None:
        failed: Exception | None = None
        for handle in self._handles:
            try:
                handle.wait()
            except AtollError as error:
                failed = failed or error
        if failed is not None:
            raise failed


def void(_: object) -> None:
    """An answer that says nothing."""
