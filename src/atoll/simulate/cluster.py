"""One coordinator and N islands in one process, on a virtual clock."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from atoll import files as filesystem
from atoll import torch_threads
from atoll.config import RunFile
from atoll.coordinator.service import Coordinator
from atoll.coordinator.stores import Stores
from atoll.errors import AtollError, ConfigError
from atoll.island import trainer
from atoll.island.participant import Participant
from atoll.island.presence import Attending
from atoll.island.run import Run
from atoll.island.sharded.run import ShardedRun
from atoll.island.state.store import IslandIdentity, IslandStore
from atoll.protocol.messages import Status
from atoll.protocol.sharded import Launch
from atoll.simulate import buckets
from atoll.simulate.coordinator import SimulatedCoordinator, stores_in
from atoll.simulate.fibers import Fiber, Scheduler
from atoll.simulate.link import MemoryLink
from atoll.simulate.sea import Sea
from atoll.strategies.sharded.quorum.step import MEETING_DEADLINES

STEP_SECONDS = 0.1  # virtual time of one inner step
TICK_SECONDS = 0.05
LIMIT_SECONDS = 1e7
LAUNCH = "0" * 32  # of the one launch of a run whose ranks torchrun would start
# Virtual time without a step or a closed round, beyond what the run's own waiting may take, after
# which nothing will ever happen.
STUCK_SECONDS = 60.0

Progress = Callable[[Status], None]


@dataclass(frozen=True)
class Outage:
    """The coordinator is killed once `version` is published, and started again so much later."""

    version: int
    seconds: float


@dataclass(frozen=True)
class Simulated:
    """What a simulated run came to."""

    digest: str
    published_digest: str
    virtual_seconds: float
    status: Status


def worker_name(index: int) -> str:
    """The worker_id of island `index`; `make demo` and the tests use the same ones."""
    return f"island-{index}"


def simulate(
    run_file: RunFile,
    *,
    islands: int,
    rounds: int | None = None,
    location: str | None = None,
    directory: Path | None = None,
    progress: Progress = lambda _: None,
    outage: Outage | None = None,
    speeds: Sequence[float] = (),
    latencies: Sequence[Sequence[float]] = (),
) -> Simulated:
    """Runs `run_file` with so many islands to its end; keeps the state in `directory` if given.

    `speeds` say how many steps each island makes while others make one, in turn; none: all alike.
    `latencies[a][b]` are the seconds from rank a to rank b of a sharded run; none: all are near.
    """
    if rounds is not None:
        stop = {**run_file.settings.get("stop", {}), "rounds": rounds}
        run_file = replace(run_file, settings={**run_file.settings, "stop": stop})
    with ExitStack() as stack, torch_threads.kept():
        if directory is None:
            directory = Path(stack.enter_context(TemporaryDirectory(prefix="atoll-simulate-")))
        with filesystem.naming("make", directory):
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        cluster = SimulatedCluster(run_file, directory, location, outage)
        cluster.latencies = latencies
        cluster.step_seconds = [STEP_SECONDS / speed for speed in speeds or (1.0,)]
        return cluster.run(islands, progress)


class SimulatedCluster:
    """One run's coordinator and islands as fibers of one scheduler, so one runs at a time."""

    def __init__(
        self,
        run_file: RunFile,
        home: Path,
        location: str | None = None,
        outage: Outage | None = None,
    ) -> None:
        self._outage = outage
        self.scheduler = Scheduler()
        self._home = home
        self._location = location
        self.coordinator = SimulatedCoordinator(run_file, self.scheduler, self._open_stores)
        manifest = self.coordinator.manifest
        wait_seconds = manifest.heartbeat_timeout + manifest.membership.grace_seconds
        if self.coordinator.by_step:
            # At the end of a round all wait for a late rank.
            deadlines = MEETING_DEADLINES if manifest.sharded.commit == "quorum" else 1
            wait_seconds += deadlines * manifest.sharded.deadline_seconds
        wait_seconds += 0.0 if outage is None else outage.seconds
        self._stuck_seconds = 2 * wait_seconds + STUCK_SECONDS
        self._moved_at = 0.0
        self.step_seconds = [STEP_SECONDS]  # of each island in turn
        self._delays: dict[int, float] = {}  # of islands, by their numbers
        self.latencies: Sequence[Sequence[float]] = ()  # between ranks, by their islands' numbers
        self._sea: Sea | None = None
        self._islands = 0  # that the run begins with
        self._fibers: dict[str, list[Fiber]] = {}  # of each island, its training first
        self._returning: set[str] = set()  # islands that are down and will be started again
        self.runs: dict[str, Participant] = {}
        torch_threads.use(manifest.inner.threads)

    def _open_stores(self) -> Stores:
        return stores_in(self._home)

    def run(self, islands: int, progress: Progress) -> Simulated:
        """Runs so many islands until all have ended."""
        needed = self.coordinator.manifest.membership.min_workers
        try:
            if islands < needed:
                raise ConfigError(
                    f"islands={islands} is below membership.min_workers={needed}; no round would "
                    f"ever begin, so simulate at least {needed}"
                )
            self._islands = islands
            self.scheduler.spawn("coordinator", lambda: self._close_rounds(progress))
            for index in range(islands):
                self.start(index)
            self.scheduler.run_until(self._is_over, limit_seconds=LIMIT_SECONDS)
            coordinator = self.coordinator.now
            master = published = coordinator.digest
            if isinstance(coordinator, Coordinator):
                published = coordinator.weights.current.digests.published.root
            return Simulated(master, published, self.scheduler.now(), coordinator.status())
        finally:
            self.coordinator.close_stores()

    def _is_over(self) -> bool:
        return not self._returning and all(f[0].done for f in self._fibers.values())

    # Islands

    def start(self, index: int) -> None:
        """Begins an island, or its next life."""
        name = worker_name(index)
        self._returning.discard(name)
        self._fibers[name] = []
        self._spawn(name, "", partial(self._island, index))

    def kill(self, index: int, *, returns: bool = False) -> None:
        """Ends an island at once, as a killed process ends; what `returns` is waited for."""
        if returns:
            self._returning.add(worker_name(index))
        for fiber in self._fibers[worker_name(index)]:
            self.scheduler.stop(fiber)

    def await_death(self, index: int) -> None:
        """Returns when nothing of a killed island is left: its fibers end at their next turns."""
        fibers = list(self._fibers[worker_name(index)])
        self.scheduler.wait_for(lambda: all(f.done for f in fibers), threading.Condition())

    def is_down(self, index: int) -> bool:
        """Whether the island was killed and will be started again."""
        return worker_name(index) in self._returning

    def delay(self, index: int, seconds: float) -> None:
        """The step that the island computes takes so much longer; all else of it goes on."""
        self._delays[index] = seconds

    def _delay_of(self, index: int) -> float:
        return self._delays.pop(index, 0.0)

    def freeze(self, index: int) -> None:
        """Nothing of the island goes on until `thaw`, as that of a stopped process."""
        for fiber in self._fibers[worker_name(index)]:
            self.scheduler.freeze(fiber)

    def thaw(self, index: int) -> None:
        """The island goes on, as a continued process does."""
        for fiber in self._fibers[worker_name(index)]:
            self.scheduler.thaw(fiber)

    def _spawn(self, name: str, part: str, work: Callable[[], None]) -> None:
        self._fibers[name].append(self.scheduler.spawn(f"{name} {part}".strip(), work))

    # The coordinator

    def _close_rounds(self, progress: Progress) -> None:
        while True:
            while not self.coordinator.is_away and self.coordinator.now.advance():
                self._moved_at = self.scheduler.now()
                progress(self.coordinator.now.status())
                outage = self._outage
                if outage is not None and self.coordinator.now.version == outage.version:
                    self._outage = None
                    self.coordinator.go_away(outage.seconds)
            if self.scheduler.now() - self._moved_at > self._stuck_seconds:
                raise self._stuck()
            self.scheduler.sleep(TICK_SECONDS)

    def _stuck(self) -> AtollError:
        status = self.coordinator.now.status()
        live = [worker.worker_id for worker in status.workers if worker.live]
        return AtollError(
            f"the simulation is stuck: no step and no closed round in "
            f"{self._stuck_seconds:.0f} virtual seconds; version {status.version}, live "
            f"islands {live}, waiting for {list(status.waiting_for)}, min_workers="
            f"{self.coordinator.manifest.membership.min_workers}"
        )

    # One island

    def _after_step(self, seconds: float) -> None:
        self._moved_at = self.scheduler.now()
        self.scheduler.sleep(seconds)

    def _island(self, index: int) -> None:
        name = worker_name(index)
        with closing(IslandStore(self._home / name)) as store:
            seconds = self.step_seconds[index % len(self.step_seconds)]

            def after_step() -> None:
                self._after_step(seconds + self._delay_of(index))

            run = self._joined(index, store)
            with self._alive(run, name):
                trainer.train(run, location=self._location, after_step=after_step)

    def _joined(self, index: int, store: IslandStore) -> Run | ShardedRun:
        link = MemoryLink(self.coordinator.reach, self.scheduler)
        identity, jitter = _identity(index), random.Random(index)
        spawn = partial(self._spawn, worker_name(index))
        if not self.coordinator.by_step:
            made = buckets.of_island(
                *(self.coordinator.buckets, identity.worker_id, store.directory / "gather"),
                *(self.scheduler, link.traffic),
            )
            return Run(
                *(link, store, self.scheduler),
                identity=identity,
                jitter=jitter,
                spawn=spawn,
                buckets=made,
            )
        sea = self._sea = self._sea or Sea(self.scheduler, latencies=_by_name(self.latencies))
        return ShardedRun(
            *(link, store.directory, self.scheduler),
            identity=identity,
            jitter=jitter,
            host=sea.host(self._launch(index)),
            spawn=spawn,
        )

    def _launch(self, index: int) -> Launch | None:
        if self.coordinator.manifest.sharded.transport != "torch_dist":
            return None
        return Launch(id=LAUNCH, rank=index, size=self._islands)

    @contextmanager
    def _alive(self, run: Participant, name: str) -> Iterator[None]:
        """Its heart beats and its presence is known while it trains."""
        self.runs[name] = run
        first = len(self._fibers[name])
        self._spawn(name, "pulse", partial(self._pulse, run))
        self._spawn(name, "presence", partial(self._presence, run))
        beside = self._fibers[name][first : first + 2]
        try:
            yield
        finally:
            for fiber in beside:
                self.scheduler.stop(fiber)

    def _pulse(self, run: Participant) -> None:
        while True:
            self.scheduler.sleep(run.manifest.heartbeat_interval)
            # As in a process: the training fiber meets the same error and acts on it.
            with suppress(AtollError):
                run.beat()

    def _presence(self, run: Participant) -> None:
        attending = Attending(run)
        while True:
            self.scheduler.sleep(attending.once())


def _identity(index: int) -> IslandIdentity:
    key = random.Random(f"island key {index}").randbytes(32).hex()
    return IslandIdentity(worker_name(index), key)


def _by_name(matrix: Sequence[Sequence[float]]) -> dict[str, dict[str, float]]:
    return {
        worker_name(a): {worker_name(b): seconds for b, seconds in enumerate(row)}
        for a, row in enumerate(matrix)
    }
