"""Crews: gloo processes that are started once for each number of ranks and given many jobs.

A rank that raises, dies or is late ends its crew, since what gloo has under way cannot be taken
back; the next job starts a new one. Processes are ended by the pid of what was started here.
"""

import json
import multiprocessing
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from atoll.clock import Clock, SystemClock
from atoll.errors import ConfigError, RanksFailed
from atoll.pools.gradcheck import crew_rank

GLOO_SECONDS = 60.0  # for one collective of a rank
START_SECONDS = 120.0
JOB_SECONDS = 300.0
GRACE_SECONDS = 1.0  # for the others' words after a first rank has failed
STOP_SECONDS = 5.0
MAX_RANKS = 64
MAX_LOG_BYTES = 2000  # the end of a dead rank's log
# Loaded once, before the ranks are forked: FSDP2 and what DDP loads when it is first used take
# most of a second each.
PRELOAD = ("torch", "torch.distributed.fsdp", "torch._dynamo", crew_rank.__name__)


@dataclass(frozen=True, slots=True)
class _Rank:
    number: int
    process: ForkServerProcess
    pipe: Connection
    log: Path


@dataclass(frozen=True, slots=True)
class _Failure:
    """What is known of a rank that did not do its job; the likelier cause is told first."""

    rank: int
    said: str
    is_cause: bool  # not merely a collective that another rank left


class Crew:
    """`size` processes with a gloo group; started by the first job. For one thread."""

    def __init__(
        self, size: int, *, job_seconds: float = JOB_SECONDS, clock: Clock | None = None
    ) -> None:
        if not 1 <= size <= MAX_RANKS:
            raise ConfigError(f"{size} ranks are asked for; a crew has 1 to {MAX_RANKS}")
        self.size = size
        self._seconds = job_seconds
        self._clock = clock or SystemClock()
        self._ranks: list[_Rank] = []
        self._held = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Of the ranks that run now; empty before the first job and after a failed one."""
        return [rank.process.pid for rank in self._ranks if rank.process.pid is not None]

    def run(self, entry: str, spec: Mapping[str, Any], folder: Path) -> None:
        """Calls `entry` ("module:function") on every rank with `spec` and `folder`.

        Returns when all are done. RanksFailed names every rank that raised, died or was late, with
        the text of its error; then the crew is ended.
        """
        told = {"entry": entry, "spec": dict(spec), "folder": str(folder.resolve())}
        data = json.dumps(told).encode()
        if len(data) > crew_rank.MAX_MESSAGE_BYTES:
            raise ConfigError(
                f"a job of {len(data)} bytes is more than {crew_rank.MAX_MESSAGE_BYTES}; pass "
                f"tensors as files in its folder"
            )
        if not self._ranks:
            self._start()
        for rank in self._ranks:
            _send(rank.pipe, data)
        self._await(f"{entry.partition(':')[2]!r}", self._seconds)

    def close(self) -> None:
        """Lets the ranks end, and kills what has not ended soon; harmless when repeated."""
        for rank in self._ranks:
            _send(rank.pipe, b"null")
        until = self._clock.now() + STOP_SECONDS
        for rank in self._ranks:
            rank.process.join(max(0.0, until - self._clock.now()))
        self._kill()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOAD))
        home = self._held.enter_context(tempfile.TemporaryDirectory(prefix="atoll-crew-"))
        for number in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=crew_rank.serve,
                args=(number, self.size, home, theirs, GLOO_SECONDS),
                name=f"crew-{self.size}-{number}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._ranks.append(_Rank(number, process, ours, Path(home) / f"rank-{number}.log"))
        self._await("joining the group", START_SECONDS)

    def _await(self, what: str, seconds: float) -> None:
        """Returns when every rank has answered well; else ends the crew and raises."""
        waiting = {rank.pipe: rank for rank in self._ranks}
        failures: list[_Failure] = []
        until = self._clock.now() + seconds
        while waiting:
            left = max(0.0, until - self._clock.now())
            heard = connection.wait(list(waiting), timeout=left)
            if not heard:
                break
            for pipe in heard:
                rank = waiting.pop(pipe)  # type: ignore[call-overload] # we gave it connections
                failure = _heard(rank)
                if failure and not failures:
                    until = min(until, self._clock.now() + GRACE_SECONDS)
                failures += [failure] if failure else []
        if not failures and not waiting:
            return
        if not failures:
            failures = [_late(rank, seconds) for rank in waiting.values()]
        self._kill()
        raise RanksFailed(_told(what, self.size, failures))

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.process.kill()  # SIGKILL to its pid; nothing where it has ended
        for rank in self._ranks:
            rank.process.join()
            rank.process.close()
            rank.pipe.close()
        self._ranks = []
        self._held.close()


class Crews:
    """One crew for each number of ranks, kept until the end: several files share them."""

    def __init__(self) -> None:
        self._crews: dict[int, Crew] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def of(self, size: int) -> Crew:
        """The crew of `size` ranks, a new one the first time."""
        if size not in self._crews:
            self._crews[size] = Crew(size)
        return self._crews[size]

    def close(self) -> None:
        """Ends all of them."""
        for crew in self._crews.values():
            crew.close()
        self._crews = {}


def _send(pipe: Connection, data: bytes) -> None:
    with suppress(OSError):  # a rank that is gone is met by the wait that follows
        pipe.send_bytes(data)


def _heard(rank: _Rank) -> _Failure | None:
    """What a rank whose pipe has something says, if it is a failure."""
    try:
        answer = json.loads(rank.pipe.recv_bytes(crew_rank.MAX_MESSAGE_BYTES))
    except (EOFError, OSError):
        rank.process.join(STOP_SECONDS)
        code = rank.process.exitcode
        return _Failure(rank.number, f"died with exit code {code}{_tail(rank.log)}", True)
    if "error" not in answer:
        return None
    said = str(answer["error"])
    return _Failure(rank.number, said, "gloo" not in said.lower())


def _late(rank: _Rank, seconds: float) -> _Failure:
    return _Failure(rank.number, f"was not done within {seconds:g} s", True)


def _told(what: str, size: int, failures: Sequence[_Failure]) -> str:
    """Each different text once, with the ranks that said it."""
    causes = [one for one in failures if one.is_cause] or list(failures)
    by_text: dict[str, list[int]] = {}
    for one in sorted(causes, key=lambda one: one.rank):
        by_text.setdefault(one.said, []).append(one.rank)
    said = "; ".join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}"
        for text, ranks in by_text.items()
    )
    return f"{what} on {size} ranks: {said}"


def _tail(log: Path) -> str:
    """The last line of a dead rank's log, of so many bytes at most."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_LOG_BYTES))
            lines = file.read(MAX_LOG_BYTES).decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return f" ({lines[-1]})" if lines else ""
