"""Many short lives of real `atoll` processes, for tests that kill them by the dozen.

Each is forked from a server that has loaded the libraries, so that a life begins in milliseconds
and not after seconds of imports; what runs in it is the command line. Owns the run file, where the
stores are, and what a life leaves: an exit code and a log.
"""

import importlib
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from atoll.blobs.access import S3Access
from atoll.clock import SystemClock
from atoll.errors import AtollError
from atoll.launch import state
from atoll.ledger.records import ContributionRecord, RoundRecord
from tests import processes, servers
from tests.ledgers import alone

CLOCK = SystemClock()
POLL_SECONDS = 0.002
# Missing ones are loaded by each life itself.
PRELOADED = [
    "atoll.cli.app",
    "atoll.cli.serve",
    "atoll.cli.join",
    "torch._dynamo",
    "psycopg",
    "obstore.store",
    "pysqlite3.dbapi2",
    "sqlalchemy.dialects.sqlite",
    "sqlalchemy.dialects.postgresql.psycopg",
    "uvicorn.lifespan.off",
    "uvicorn.loops.asyncio",
]


def be_atoll(words: Sequence[str], log_path: str, variables: Mapping[str, str]) -> None:
    """The whole of a life; runs in the forked process."""
    descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.environ.update(variables)
    if "ATOLL_TEST_UNFENCED" in variables:
        _lose_the_fence()
    launcher, *given = variables.get("ATOLL_TEST_FAILPOINT", "atoll.cli").split()
    sys.argv = ["atoll", *given, *words]
    importlib.import_module(launcher).main()


def failpoint(program: str, points: str, folder: Path) -> dict[str, str]:
    """Variables of a life that a launcher of tests/faults stops short at `points`."""
    folder.mkdir(parents=True)
    (folder / "go.json").write_text("[]")
    launcher = f"tests.faults.{program}_with_failpoint"
    return {"ATOLL_TEST_FAILPOINT": f"{launcher} {points} {folder}"}


def _lose_the_fence() -> None:
    """The mutant: a coordinator that never asks whether its epoch is in force."""
    from atoll.ledger.postgres.epochs import Epoch

    Epoch.check = lambda *_: None  # type: ignore[method-assign] # the point of it


@dataclass
class Life:
    """One process."""

    name: str
    process: BaseProcess
    log: "Log"

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def is_running(self) -> bool:
        return self.process.is_alive()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> int | None:
        """SIGKILL; returns the exit code, which tells whether that was the end of it."""
        self.process.kill()
        return self.wait()

    def wait(self) -> int | None:
        self.process.join(processes.LIMIT_SECONDS)
        if self.process.is_alive():
            raise AtollError(f"{self.name} does not end; its log ends with:\n{self.log.tail()}")
        return self.process.exitcode


@dataclass
class Log:
    """What a process and its later lives write, read as it comes."""

    path: Path
    _offset: int = 0
    _rest: bytes = b""

    def fresh(self) -> list[str]:
        """Whole lines since the last call."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def tail(self, nbytes: int = 6000) -> str:
        return self.path.read_bytes()[-nbytes:].decode(errors="replace")


@dataclass(frozen=True)
class Place:
    """Where ledger and blobs are, and what a process needs to reach them."""

    ledger: str | None = None
    blobs: str | None = None
    s3: S3Access | None = None

    @property
    def variables(self) -> dict[str, str]:
        if self.s3 is None:
            return {}
        return {
            "AWS_ACCESS_KEY_ID": self.s3.access_key_id,
            "AWS_SECRET_ACCESS_KEY": self.s3.secret_access_key,
            "AWS_ENDPOINT_URL": self.s3.url,
        }

    def settings(self) -> str:
        given = {"ledger": self.ledger, "blobs": self.blobs}
        return "".join(f"{name} = {json.dumps(at)}\n" for name, at in given.items() if at)


def s3_access(server: servers.RunningServer) -> S3Access:
    """How the tests' own server is reached."""
    return S3Access(
        access_key_id=servers.ACCESS_KEY_ID,
        secret_access_key=servers.SECRET_ACCESS_KEY,
        endpoint=server.url,
    )


def run_file(
    path: Path,
    place: Place,
    *,
    rounds: int,
    min_workers: int,
    retain: str,
    more: str = "",
    codecs: tuple[str, str] = ("int8", "bf16"),
) -> Path:
    """A run whose rounds take a third of a second: long enough for a kill to land in its parts.

    `more` are settings that stand before the first section, and sections after them.
    """
    path.write_text(
        f"""
name = "lives"
seed = 1
sync_every = 6
heartbeat_interval = 2.0
heartbeat_timeout = 20.0
{more}
[model]
architecture = "gpt"
vocab = 64
block = 32
layers = 2
heads = 2
width = 64

[data]
kind = "synthetic"
seed = 7
rows = 2000
held_out_rows = 6
block = 32

[inner]
lr = 2e-3
batch = 4

[upload]
codec = "{codecs[0]}"

[download]
codec = "{codecs[1]}"

[membership]
min_workers = {min_workers}

[evaluate]
every = 5

[stop]
rounds = {rounds}

[storage]
snapshot_every = 4
retain = "{retain}"
{place.settings()}"""
    )
    return path


@dataclass
class Lives:
    """One run's processes. Leaving the `with` block kills those that are left, by pid."""

    home: Path
    run_file: Path
    place: Place = field(default_factory=Place)
    port: int = 0
    living: dict[str, Life] = field(default_factory=dict)
    ended: list[Life] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for life in (*self.ended, *self.living.values()):
            if life.is_running():
                life.signal(signal.SIGKILL)
                life.process.join()
        for life in self.living.values():
            if exc is not None:
                exc.add_note(f"--- log of {life.name}:\n{life.log.tail()}")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def directory(self, name: str = "coordinator") -> Path:
        return self.home / name

    def start_coordinator(
        self, name: str = "coordinator", *options: str, port: int = 0, **variables: str
    ) -> Life:
        """Begins a life of a coordinator; it may refuse to serve."""
        directory = self.directory(name)
        directory.mkdir(parents=True, exist_ok=True)
        ready = directory / "ready.json"
        ready.unlink(missing_ok=True)
        words = ["serve", str(self.run_file), "--dir", str(directory), "--port", str(port)]
        words += ["--ready-file", str(ready), *options]
        tokens = {
            "ATOLL_WORKER_TOKEN": processes.TOKENS.worker,
            "ATOLL_ADMIN_TOKEN": processes.TOKENS.admin,
        }
        return self._start(name, words, {**tokens, **variables})

    def serve(self, name: str = "coordinator", *options: str, **variables: str) -> Life:
        """A coordinator that serves; each on the port of the one before it."""
        life = self.start_coordinator(name, *options, port=self.port, **variables)
        self.port = int(self.ready(life)["url"].rpartition(":")[2])
        return life

    def ready(self, life: Life) -> dict[str, Any]:
        """What a coordinator says once it serves."""
        path = self.directory(life.name) / "ready.json"

        def found() -> bool:
            if not life.is_running():
                raise AtollError(f"{life.name} does not serve; its log:\n{life.log.tail()}")
            return path.exists()

        processes.eventually(f"{life.name} serving", found)
        return dict(json.loads(path.read_text()))

    def join(
        self,
        worker_id: str,
        url: str | None = None,
        *,
        options: Sequence[str] = (),
        **variables: str,
    ) -> Life:
        """Begins a life of an island, from the state that the one before it left."""
        words = ["join", url or self.url, "--worker-id", worker_id, "--device", "cpu"]
        words += ["--state", str(self.home / worker_id), *options]
        token = {"ATOLL_TOKEN": processes.TOKENS.worker}
        return self._start(worker_id, words, {**token, **variables})

    def _start(self, name: str, words: Sequence[str], variables: Mapping[str, str]) -> Life:
        before = self.living.get(name)
        log = Log(self.home / f"{name}.log") if before is None else before.log
        variables = {**variables, **self.place.variables}
        process = self._context.Process(
            target=be_atoll, args=(tuple(words), str(log.path), variables), daemon=True
        )
        process.start()
        if before is not None:
            self.ended.append(before)
        self.living[name] = Life(name, process, log)
        return self.living[name]

    def finish_all(self, coordinator: str = "coordinator") -> None:
        """Waits until the coordinator and then all islands have ended well.

        An island whose last life began after the run was over, and its coordinator gone, is told so
        by one that serves on, as its operator would do.
        """
        self.finish(coordinator)
        islands = [name for name in self.living if name != coordinator]
        if any(self.living[name].is_running() for name in islands):
            served = self.serve(coordinator, "--stay")
            self.finish(*islands)
            served.kill()
        else:
            self.finish(*islands)

    def finish(self, *names: str) -> None:
        """Waits until all of them have ended well."""
        for name in names or tuple(self.living):
            life = self.living[name]
            code = life.wait()
            if code != 0:
                raise AtollError(f"{name} ended with {code}:\n{life.log.tail()}")

    def history(self, name: str = "coordinator") -> "History":
        """What the ledger holds, once nobody does."""
        with state.at_rest(self.directory(name), s3=self.place.s3) as (ledger, _):
            rounds = alone(ledger).rounds.all()
            return History(
                rounds, [c for r in rounds for c in alone(ledger).contributions.of_round(r.round)]
            )

    def audit(self, name: str = "coordinator") -> dict[str, Any]:
        """What `atoll audit --replay --json` finds."""
        with pytest.MonkeyPatch.context() as patch:
            for variable, value in self.place.variables.items():
                patch.setenv(variable, value)
            return processes.audit(self.directory(name))


@dataclass(frozen=True)
class History:
    """A run that has ended."""

    rounds: list[RoundRecord]
    contributions: list[ContributionRecord]

    @property
    def digests(self) -> list[str | None]:
        return [record.master_digest for record in self.rounds]

    def counted(self) -> list[tuple[int, str, int, int, float, float]]:
        """What two runs of the same bits have in common."""
        return [
            (c.round, c.worker_id, c.rows, c.tokens, c.loss_sum, c.norm) for c in self.contributions
        ]
