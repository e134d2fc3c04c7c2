"""Runs of real processes for the fault and end-to-end tests, on top of `atoll.launch.local`.

Owns a tiny run file, a cluster whose processes end with the test that started them, and a reader of
what a run left behind. Waits only by polling conditions, each with a limit.
"""

import fcntl
import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner

from atoll.cli.app import app
from atoll.clock import SystemClock
from atoll.errors import AtollError
from atoll.island.link.network import NetworkLink
from atoll.launch import local, state
from atoll.launch.local import LocalCoordinator, LocalIsland, LocalProcess, Tokens
from atoll.ledger.records import ContributionRecord, LeaseRecord, RoundRecord, WorkerRecord
from atoll.protocol.messages import Status, StatusRequest
from tests.ledgers import alone

TOKENS = Tokens(worker="worker-token-of-tests", admin="admin-token-of-tests")
ISLANDS = ("island-0", "island-1")  # the names `atoll simulate` gives
ROUNDS = 6
LIMIT_SECONDS = 60.0  # far above what any wait takes; reached only when something is broken
ATOLL = (sys.executable, "-m", "atoll")
KILLED = -signal.SIGKILL  # the exit code of a killed process
FAULTS = Path(__file__).parent / "faults"
# For models of 16 tokens in rows of 8, which learn it in no time.
SMALL_DATA = """
[data]
kind = "synthetic"
seed = 1
rows = 200
held_out_rows = 4
block = 8
vocab = 16

[inner]
batch = 2
"""

_CLOCK = SystemClock()

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the tests vary of the tiny run; 24 kB of weights a layer, 6 rounds of 3 steps."""

    seed: int = 1
    schedule: str = "sync_every = 3"  # and the mode, if it is another than sync
    layers: int = 1
    upload: str = "bf16"
    download: str = "fp32"
    min_workers: int = 2
    heartbeat_interval: float = 2.0
    heartbeat_timeout: float = 10.0

    def write(self, path: Path) -> Path:
        """Writes the run file."""
        path.write_text(
            f"""
name = "tiny"
seed = {self.seed}
{self.schedule}
heartbeat_interval = {self.heartbeat_interval}
heartbeat_timeout = {self.heartbeat_timeout}

[model]
architecture = "gpt"
vocab = 32
block = 16
layers = {self.layers}
heads = 2
width = 32

[data]
kind = "synthetic"
seed = 7
rows = 500
held_out_rows = 8
block = 16

[inner]
lr = 2e-3
batch = 2

[upload]
codec = "{self.upload}"

[download]
codec = "{self.download}"

[membership]
min_workers = {self.min_workers}

[evaluate]
every = 2

[stop]
rounds = {ROUNDS}

[storage]
snapshot_every = 2
"""
        )
        return path


BF16 = Settings(upload="bf16", download="fp32")
INT8 = Settings(upload="int8", download="bf16")
# A fragment is merged in the middle of the second round after its own, with the next in flight.
STREAMING = Settings(
    upload="int4",
    download="bf16",
    layers=2,
    schedule="""mode = "streaming"
sync_every = 6
num_fragments = 2
delay_steps = 4
local_weight = 0.25""",
)


@dataclass(frozen=True)
class Failpoint:
    """A launcher of tests/faults, the points (`name@round`) it acts at, the folder it speaks by."""

    program: str
    points: tuple[str, ...]
    folder: Path

    def words(self) -> tuple[str, ...]:
        """The program that stands in for `python -m atoll`."""
        self.folder.mkdir(parents=True)
        launcher = FAULTS / f"{self.program}_with_failpoint.py"
        return (sys.executable, str(launcher), ",".join(self.points), str(self.folder))

    def marker(self) -> dict[str, Any]:
        """What was written at the point, just before the kill."""
        return dict(json.loads((self.folder / "marker.json").read_text()))

    def wait_held(self, round_number: int) -> None:
        """Returns once the process stands still in the round."""
        path = self.folder / f"held-{round_number}"
        eventually(str(path), path.exists)

    def release(self, round_number: int) -> None:
        """Lets a held process go on."""
        (self.folder / f"release-{round_number}").touch()


P = TypeVar("P", bound=LocalProcess)


@dataclass(frozen=True)
class Standby(Generic[P]):
    """A process that loads its libraries and then waits for its turn to be `atoll`.

    Loading takes most of a short process's time; beside the lives before it, it costs no waiting.
    """

    process: P
    failpoint: Failpoint

    def go(self, *options: str) -> P:
        """Lets it begin, with further options."""
        part = self.failpoint.folder / "part"
        part.write_text(json.dumps(options))
        part.rename(self.failpoint.folder / "go.json")
        return self.process


@dataclass(frozen=True)
class Held:
    """Islands that stand still in a round."""

    islands: Sequence[Standby[LocalIsland]]
    round_number: int

    def release(self) -> None:
        """Lets all of them go on."""
        for island in self.islands:
            island.failpoint.release(self.round_number)


def eventually(what: str, condition: Callable[[], T | bool | None]) -> T:
    """The condition's first true value; AtollError when there is none within the limit."""
    deadline = _CLOCK.now() + LIMIT_SECONDS
    while not (value := condition()):
        if _CLOCK.now() > deadline:
            raise AtollError(f"{what} did not come within {LIMIT_SECONDS:.0f} s")
        _CLOCK.sleep(0.02)
    return value  # type: ignore[return-value] # not False and not None: it is true


class Cluster:
    """One run's processes. Leaving the `with` block kills those that are left, by pid."""

    def __init__(self, home: Path, settings: Settings) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.home = home
        self.directory = home / "coordinator"
        self.run_file = settings.write(home / "run.toml")
        self.url = ""
        self.islands: dict[str, LocalIsland] = {}
        self._started: list[LocalProcess] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self._started:
            process.kill()
        if exc is not None:
            for process in {p.log_path: p for p in self._started}.values():
                exc.add_note(f"--- log of {process.name}:\n{process.log_tail()}")

    @property
    def port(self) -> int:
        """Where the coordinator serves or served; 0 before the first one."""
        return urlsplit(self.url).port or 0 if self.url else 0

    def serve(self) -> LocalCoordinator:
        """Starts a coordinator and waits until it serves; a later one on the first one's port."""
        return self._ready(self._coordinator(ATOLL, "--port", str(self.port)))

    def prepare_coordinator(self, point: str) -> Standby[LocalCoordinator]:
        """Starts a coordinator with a failpoint, which loads and then waits for `take_over`."""
        failpoint = self._failpoint("coordinator", point)
        return Standby(self._coordinator(failpoint.words()), failpoint)

    def take_over(self, standby: Standby[LocalCoordinator]) -> LocalCoordinator:
        """Lets a prepared coordinator serve, on the port of the one before it."""
        standby.process.ready_path.unlink(missing_ok=True)
        return self._ready(standby.go("--port", str(self.port)))

    def _coordinator(self, program: Sequence[str], *options: str) -> LocalCoordinator:
        coordinator = local.start_coordinator(
            self.run_file, self.directory, tokens=TOKENS, options=options, program=program
        )
        self._started.append(coordinator)
        return coordinator

    def _ready(self, coordinator: LocalCoordinator) -> LocalCoordinator:
        coordinator.wait_ready(timeout_seconds=LIMIT_SECONDS)
        self.url = coordinator.url
        return coordinator

    def join(self, worker_id: str) -> LocalIsland:
        """Starts an island."""
        self.islands[worker_id] = self._island(worker_id, ATOLL)
        return self.islands[worker_id]

    def join_all(self) -> None:
        """Starts both islands."""
        for worker_id in ISLANDS:
            self.join(worker_id)

    def prepare_island(self, worker_id: str, *points: str) -> Standby[LocalIsland]:
        """Starts an island with failpoints, which loads and then waits for `enter`."""
        failpoint = self._failpoint(f"island-{worker_id}", *points)
        return Standby(self._island(worker_id, failpoint.words()), failpoint)

    def join_held(self, round_number: int) -> "Held":
        """Starts both islands and returns once they stand still in the round."""
        islands = [self.prepare_island(name, f"hold@{round_number}") for name in ISLANDS]
        for island in islands:
            self.enter(island)
        for island in islands:
            island.failpoint.wait_held(round_number)
        return Held(islands, round_number)

    def enter(self, standby: Standby[LocalIsland]) -> LocalIsland:
        """Lets a prepared island join; one of the same name goes on from the same state."""
        self.islands[standby.process.name] = standby.go()
        return standby.process

    def _island(self, worker_id: str, program: Sequence[str]) -> LocalIsland:
        island = local.start_island(
            self.url, self.home / worker_id, worker_id=worker_id, tokens=TOKENS, program=program
        )
        self._started.append(island)
        return island

    def _failpoint(self, name: str, *points: str) -> Failpoint:
        folder = self.home / "failpoints" / f"{name}-{'-'.join(points)}"
        return Failpoint(name.partition("-")[0], points or ("none@0",), folder)

    def status(self) -> Status | None:
        """What the coordinator shows; None while it is away."""
        link = NetworkLink(self.url, token=TOKENS.worker)
        try:
            return link.send(StatusRequest())
        except AtollError:
            return None
        finally:
            link.close()

    def wait_status(self, what: str, claim: Callable[[Status], bool]) -> Status:
        """The first status of which the claim holds."""

        def met() -> Status | None:
            status = self.status()
            return status if status is not None and claim(status) else None

        return eventually(what, met)

    def finish(self, coordinator: LocalCoordinator) -> "Finished":
        """Waits until islands and coordinator have ended well, and reads what they left."""
        for process in (*self.islands.values(), coordinator):
            code = process.wait(timeout_seconds=LIMIT_SECONDS)
            if code != 0:
                raise AtollError(f"{process.name} ended with {code}:\n{process.log_tail()}")
        return finished(self.home)


@dataclass(frozen=True)
class Records:
    """A ledger's content."""

    rounds: list[RoundRecord]
    contributions: list[ContributionRecord]
    leases: list[LeaseRecord]
    workers: dict[str, WorkerRecord]

    def workers_in(self, round_number: int) -> list[str]:
        """Whose contributions the round holds, in the order of the fold."""
        return [c.worker_id for c in self.contributions if c.round == round_number]

    def counted(self) -> list[tuple[int, str, int, int, float, float]]:
        """What two runs of the same bits have in common: all but run, times and hashes."""
        return [
            (c.round, c.worker_id, c.rows, c.tokens, c.loss_sum, c.norm) for c in self.contributions
        ]


@dataclass(frozen=True)
class Finished:
    """A run that has ended: its records, and the digest each island printed."""

    directory: Path
    records: Records
    island_digests: dict[str, str]

    @property
    def digest(self) -> str | None:
        """The params digest of the last version."""
        return self.records.rounds[-1].master_digest

    @property
    def digests(self) -> list[tuple[str | None, str | None]]:
        """Master and published digest of every round."""
        return [(r.master_digest, r.published_digest) for r in self.records.rounds]


def reference(factory: pytest.TempPathFactory, settings: Settings) -> Finished:
    """A coordinator and two islands that nobody disturbs; once for all workers of a test run."""
    name = hashlib.sha256(repr(settings).encode()).hexdigest()[:12]
    home = _shared(factory) / f"undisturbed-{name}"
    with home.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = home / "done"
        if not done.exists():
            shutil.rmtree(
                home, ignore_errors=True
            )  # a worker before this one may have come to grief
            _undisturbed(home, settings)
            done.touch()
        return finished(home)


def _shared(factory: pytest.TempPathFactory) -> Path:
    base = factory.getbasetemp()
    # A worker of pytest-xdist has a folder of its own in the run's.
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def _undisturbed(home: Path, settings: Settings) -> None:
    with Cluster(home, settings) as cluster:
        coordinator = cluster.serve()
        cluster.join_all()
        cluster.finish(coordinator)


def finished(home: Path) -> Finished:
    """What a cluster that has ended left in its home."""
    results = [json.loads((home / f"{name}.json").read_text()) for name in ISLANDS]
    directory = home / "coordinator"
    return Finished(directory, read(directory), {r["worker_id"]: r["digest"] for r in results})


def read(directory: Path) -> Records:
    """The ledger of a state directory that no coordinator holds."""
    with state.at_rest(directory) as (ledger, _):
        rounds = alone(ledger).rounds.all()
        return Records(
            rounds,
            [c for r in rounds for c in alone(ledger).contributions.of_round(r.round)],
            [lease for r in rounds for lease in alone(ledger).leases.of_round(r.round)],
            {worker.worker_id: worker for worker in alone(ledger).members.workers()},
        )


def audit(directory: Path) -> dict[str, Any]:
    """What `atoll audit --replay --json` finds."""
    return _command("audit", str(directory), "--replay", "--json")


def simulate(run_file: Path) -> dict[str, Any]:
    """What `atoll simulate --json` with two islands comes to."""
    return _command("simulate", str(run_file), "--islands", str(len(ISLANDS)), "--json")


def _command(*words: str) -> dict[str, Any]:
    # In this process: loading torch once more would take longer than the command itself.
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    return {"exit_code": result.exit_code, **json.loads(result.stdout)}
