"""An island of two ranks as fibers on the virtual clock, for what a pair must do in step.

The ranks' gradients are not combined: the leader's weights are the island's, as after any round.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor

from atoll import errors
from atoll.clock import Clock
from atoll.errors import AtollError, GroupBroken
from atoll.island import trainer
from atoll.island.link.base import Link
from atoll.island.link.led import LedLink
from atoll.island.run import Run
from atoll.island.state.store import IslandIdentity, IslandStore
from atoll.launch.joining import NO_KEY
from tests.seas import FaultyLink, Life, Sea

DEADLINE_SECONDS = 60.0  # virtual; two ranks that wait for different things stay below it for ever
TURN_SECONDS = 1 / 64

T = TypeVar("T")


class Board:
    """What the ranks of one pair have said so far."""

    def __init__(self) -> None:
        self.said: dict[tuple[int, int], tuple[str, Any]] = {}


class PairGroup:
    """One rank of two; fulfils `group.Group`. Ranks that are not in step are found out at once."""

    size = 2
    is_interrupted = False

    def __init__(self, rank: int, board: Board, clock: Clock) -> None:
        self.rank = rank
        self.is_leader = rank == 0
        self._board = board
        self._clock = clock
        self._turn = 0
        self._alone = False
        self.about = ""  # the message that is being sent

    def _exchange(self, what: str, mine: Any = None, *, patient: bool = False) -> list[Any]:
        """Both ranks' words of this turn, by rank."""
        turn, self._turn = self._turn, self._turn + 1
        self._board.said[turn, self.rank] = (what, mine)
        deadline = self._clock.now() + DEADLINE_SECONDS
        while (turn, 1 - self.rank) not in self._board.said:
            if self._clock.now() > deadline and not patient:
                raise GroupBroken(f"rank {self.rank} waits alone for {what!r}")
            self._clock.sleep(TURN_SECONDS)
        words = [self._board.said[turn, rank] for rank in (0, 1)]
        if words[0][0] != words[1][0]:
            raise GroupBroken(f"out of step: {words[0][0]!r} and {words[1][0]!r}")
        return [value for _, value in words]

    def lead(self, work: Callable[[], Any]) -> Any:
        if self._alone:
            return work()
        self._exchange(f"meeting for {work.__qualname__} {self.about}")
        if not self.is_leader:
            told, _ = self._exchange("outcome", patient=True)
            if "error" in told:
                raise errors.from_code(*told["error"])
            return json.loads(told["value"])
        try:
            with self.alone():
                value = work()
        except AtollError as error:
            self._exchange("outcome", {"error": (error.code, str(error))})
            raise
        self._exchange("outcome", {"value": json.dumps(value)})
        return value

    def together(self, work: Callable[[], T]) -> T:
        return work()  # nothing of what a rank does by itself goes wrong here

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        return [list(one) for one in self._exchange("gather", [float(v) for v in values])]

    def broadcast(self, tensor: Tensor) -> None:
        leaders, _ = self._exchange("broadcast", tensor.clone())
        tensor.copy_(leaders)

    @contextmanager
    def alone(self) -> Iterator[None]:
        before, self._alone = self._alone, True
        try:
            yield
        finally:
            self._alone = before

    @contextmanager
    def training(self) -> Iterator[None]:
        yield

    def interrupt(self) -> None:
        raise KeyboardInterrupt

    def close(self) -> None:
        pass


class ToldLink(LedLink):
    """Tells the group which message its ranks meet for."""

    def send(self, message: Any, *, alone: bool = False) -> Any:
        assert isinstance(self._group, PairGroup)
        if alone:
            return super().send(message, alone=True)
        self._group.about = type(message).__name__
        try:
            return super().send(message)
        finally:
            self._group.about = ""


class PairSea(Sea):
    """A sea in which `a` is an island of two ranks; only its leader's calls and steps have faults.

    `versions` has the manifest version of every step, by rank.
    """

    def run(self) -> str:
        self.versions: tuple[list[int], list[int]] = ([], [])
        return super().run()

    def _live(self, name: str, life: Life) -> None:
        if name != "a":
            return super()._live(name, life)
        board = Board()
        follower = life.spawn("a rank 1", lambda: self._rank(1, board, life))
        self._rank(0, board, life)
        while not follower.done:
            self.scheduler.sleep(TURN_SECONDS)

    def _rank(self, rank: int, board: Board, life: Life) -> None:
        group = PairGroup(rank, board, self.scheduler)
        real: Link | None = FaultyLink(self, "a") if group.is_leader else None
        key = random.Random("a").randbytes(32).hex()
        store = IslandStore(
            self.home / "a" / ("." if group.is_leader else "rank-1"), has_frames=group.is_leader
        )
        run = Run(
            ToldLink(group, real),
            store,
            self.scheduler,
            identity=IslandIdentity("a", key if group.is_leader else NO_KEY),
            jitter=random.Random(rank),
            group=group,
            spawn=lambda part, work: life.spawn(f"a {part}", work),
        )
        if group.is_leader:
            life.spawn("a pulse", lambda: self._beat(run))

        def after_step() -> None:
            self.versions[rank].append(run.manifest.manifest_version)
            if group.is_leader:
                self.through("a", "step", lambda: self.scheduler.sleep(0.1), {})

        try:
            trainer.train(run, after_step=after_step)
        finally:
            self.stale["a"] += run.stale_rounds if group.is_leader else 0
            store.close()
