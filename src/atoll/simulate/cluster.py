"""One coordinator and N islands in one process, on a virtual clock."""

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from atoll import files as filesystem
from atoll import torch_threads
from atoll.blobs.directory import DirectoryBlobs
from atoll.config import RunFile
from atoll.coordinator import boot
from atoll.coordinator.rounds.spool import Spool
from atoll.coordinator.service import Coordinator
from atoll.coordinator.stores import Stores
from atoll.errors import AtollError, ConfigError, CoordinatorUnreachable
from atoll.island import trainer
from atoll.island.presence import Attending
from atoll.island.run import Run
from atoll.island.state.store import IslandIdentity, IslandStore
from atoll.ledger import engines
from atoll.protocol.messages import Status
from atoll.simulate.fibers import Scheduler
from atoll.simulate.link import MemoryLink

STEP_SECONDS = 0.1  # virtual time of one inner step
TICK_SECONDS = 0.05
LIMIT_SECONDS = 1e7
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
) -> Simulated:
    """Runs `run_file` with so many islands to its end; keeps the state in `directory` if given.

    `speeds` say how many steps each island makes while others make one, in turn; none: all alike.
    """
    if rounds is not None:
        stop = {**run_file.settings.get("stop", {}), "rounds": rounds}
        run_file = replace(run_file, settings={**run_file.settings, "stop": stop})
    with ExitStack() as stack, torch_threads.kept():
        if directory is None:
            directory = Path(stack.enter_context(TemporaryDirectory(prefix="atoll-simulate-")))
        with filesystem.naming("make", directory):
            directory.mkdir(parents=True, exist_ok=True)
        cluster = SimulatedCluster(run_file, directory, location, outage)
        cluster.step_seconds = [STEP_SECONDS / speed for speed in speeds or (1.0,)]
        return cluster.run(islands, progress)


class SimulatedCluster:
    """One run's coordinator and islands as fibers of one scheduler, so one runs at a time."""

    def __init__(
        self, run_file: RunFile, home: Path, location: str | None, outage: Outage | None
    ) -> None:
        self._outage = outage
        self._scheduler = Scheduler()
        self._home = home
        self._location = location
        self._stores = self._open_stores()
        self._is_away = False
        manifest = boot.create_or_check(
            self._stores, run_file, self._scheduler, new_run_id="simulated"
        )
        wait_seconds = manifest.heartbeat_timeout + manifest.membership.grace_seconds
        wait_seconds += 0.0 if outage is None else outage.seconds
        self._stuck_seconds = 2 * wait_seconds + STUCK_SECONDS
        self._moved_at = 0.0
        self.step_seconds = [STEP_SECONDS]  # of each island in turn
        self._coordinator = boot.open_coordinator(self._stores, self._scheduler)
        torch_threads.use(manifest.inner.threads)

    def _open_stores(self) -> Stores:
        return Stores(
            engines.open_ledger(self._home / "ledger.sqlite"),
            DirectoryBlobs(self._home / "blobs"),
            Spool(self._home / "spool"),
        )

    def _reach(self) -> Coordinator:
        if self._is_away:
            raise CoordinatorUnreachable("the simulated coordinator is away")
        return self._coordinator

    def _go_away(self, seconds: float) -> None:
        """Dies without a word, keeping only what is durable, and comes back."""
        self._is_away = True
        self._close_stores()
        self._scheduler.sleep(seconds)
        self._stores = self._open_stores()
        self._coordinator = boot.open_coordinator(self._stores, self._scheduler)
        self._is_away = False

    def _close_stores(self) -> None:
        self._stores.ledger.close()
        self._stores.blobs.close()

    def run(self, islands: int, progress: Progress) -> Simulated:
        spawn, needed = self._scheduler.spawn, self._coordinator.manifest.membership.min_workers
        try:
            if islands < needed:
                raise ConfigError(
                    f"islands={islands} is below membership.min_workers={needed}; no round would "
                    f"ever begin, so simulate at least {needed}"
                )
            spawn("coordinator", lambda: self._close_rounds(progress))
            fibers = [spawn(worker_name(i), partial(self._island, i)) for i in range(islands)]
            self._scheduler.run_until(
                lambda: all(fiber.done for fiber in fibers), limit_seconds=LIMIT_SECONDS
            )
            digests, status = self._coordinator.weights.current.digests, self._coordinator.status()
            now = self._scheduler.now()
            return Simulated(digests.master.root, digests.published.root, now, status)
        finally:
            self._close_stores()

    def _close_rounds(self, progress: Progress) -> None:
        while True:
            while self._coordinator.advance():
                self._moved_at = self._scheduler.now()
                progress(self._coordinator.status())
                outage, current = self._outage, self._coordinator.weights.current
                if outage is not None and current.version == outage.version:
                    self._outage = None
                    self._go_away(outage.seconds)
            if self._scheduler.now() - self._moved_at > self._stuck_seconds:
                status = self._coordinator.status()
                live = [worker.worker_id for worker in status.workers if worker.live]
                raise AtollError(
                    f"the simulation is stuck: no step and no closed round in "
                    f"{self._stuck_seconds:.0f} virtual seconds; version {status.version}, live "
                    f"islands {live}, waiting for {list(status.waiting_for)}, min_workers="
                    f"{self._coordinator.manifest.membership.min_workers}"
                )
            self._scheduler.sleep(TICK_SECONDS)

    def _after_step(self, seconds: float) -> None:
        self._moved_at = self._scheduler.now()
        self._scheduler.sleep(seconds)

    def _island(self, index: int) -> None:
        name = worker_name(index)
        identity = IslandIdentity(name, random.Random(f"island key {index}").randbytes(32).hex())
        with closing(IslandStore(self._home / name)) as store:
            link, jitter = MemoryLink(self._reach, self._scheduler), random.Random(index)
            run = Run(
                *(link, store, self._scheduler),
                identity=identity,
                jitter=jitter,
                spawn=lambda part, work: self._scheduler.spawn(f"{name} {part}", work),
            )
            pulse = self._scheduler.spawn(f"{name} pulse", partial(self._pulse, run))
            presence = self._scheduler.spawn(f"{name} presence", partial(self._presence, run))
            try:
                seconds = self.step_seconds[index % len(self.step_seconds)]
                after_step = partial(self._after_step, seconds)
                trainer.train(run, location=self._location, after_step=after_step)
            finally:
                self._scheduler.stop(pulse)
                self._scheduler.stop(presence)

    def _pulse(self, run: Run) -> None:
        while True:
            self._scheduler.sleep(run.manifest.heartbeat_interval)
            # As in a process: the training fiber meets the same error and acts on it.
            with suppress(AtollError):
                run.beat()

    def _presence(self, run: Run) -> None:
        attending = Attending(run)
        while True:
            self._scheduler.sleep(attending.once())
