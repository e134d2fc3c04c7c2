"""Coordinator and islands as processes of this machine; used by `atoll demo` and by the tests.

Every process writes to a log file of its own and is ended by its pid, never by name.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from atoll import files as filesystem
from atoll.clock import Clock, SystemClock
from atoll.errors import AtollError

POLL_SECONDS = 0.05
PROGRAM = (sys.executable, "-m", "atoll")


@dataclass(frozen=True)
class Tokens:
    """The two tokens of a local run."""

    worker: str
    admin: str


@dataclass
class LocalProcess:
    """A started process and its log."""

    name: str
    popen: "subprocess.Popen[bytes]"
    log_path: Path
    clock: Clock = field(default_factory=SystemClock)

    @property
    def pid(self) -> int:
        return self.popen.pid

    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self.popen.poll() is None

    def wait(self, *, timeout_seconds: float) -> int:
        """The exit code; AtollError with the log's end when it does not come in time."""
        try:
            return self.popen.wait(timeout_seconds)
        except subprocess.TimeoutExpired as exc:
            late = f"{self.name} did not end within {timeout_seconds:.0f} s"
            raise AtollError(f"{late}; its log ends with:\n{self.log_tail()}") from exc

    def kill(self) -> None:
        """SIGKILL, and waits until the process is gone."""
        self.popen.kill()
        self.popen.wait()

    def terminate(self) -> None:
        """SIGTERM; does not wait."""
        self.popen.terminate()

    def log_tail(self, nbytes: int = 4000) -> str:
        """The end of what the process printed."""
        data = self.log_path.read_bytes()
        return data[-nbytes:].decode(errors="replace")


@dataclass
class LocalCoordinator(LocalProcess):
    """A coordinator process; `url` is known once it serves."""

    ready_path: Path = Path()
    url: str = ""
    fingerprint: str | None = None

    def wait_ready(self, *, timeout_seconds: float = 60.0) -> None:
        """Blocks until the coordinator serves; AtollError with its log when it does not."""
        deadline = self.clock.now() + timeout_seconds
        while not self.ready_path.exists():
            if not self.is_running() or self.clock.now() > deadline:
                raise AtollError(f"the coordinator does not serve; its log:\n{self.log_tail()}")
            self.clock.sleep(POLL_SECONDS)
        ready = json.loads(self.ready_path.read_text())
        self.url, self.fingerprint = str(ready["url"]), ready["fingerprint"]


@dataclass
class LocalIsland(LocalProcess):
    """An island process; what it came to is known once it ended well."""

    result_path: Path = Path()

    def result(self) -> dict[str, Any]:
        """The summary that `atoll join --json` printed."""
        found = json.loads(self.result_path.read_text())
        assert isinstance(found, dict)
        return found


def start_coordinator(
    run_file: Path,
    directory: Path,
    *,
    tokens: Tokens,
    options: Sequence[str] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
    program: Sequence[str] = PROGRAM,
) -> LocalCoordinator:
    """Starts `atoll serve` on a free loopback port; its log is `directory`/coordinator.log.

    `variables` are of its environment, beside those of this process.
    """
    with filesystem.naming("make", directory):
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    ready_path = directory / "ready.json"
    ready_path.unlink(missing_ok=True)
    words = [*program, "serve", str(run_file), "--dir", str(directory), "--port", "0"]
    words += ["--ready-file", str(ready_path), *options]
    log_path = directory / "coordinator.log"
    secrets = {"ATOLL_WORKER_TOKEN": tokens.worker, "ATOLL_ADMIN_TOKEN": tokens.admin}
    popen = _start(words, log_path, None, **variables, **secrets)
    return LocalCoordinator("coordinator", popen, log_path, ready_path=ready_path)


def start_island(
    url: str,
    state: Path,
    *,
    worker_id: str,
    tokens: Tokens,
    options: Sequence[str] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
    program: Sequence[str] = PROGRAM,
) -> LocalIsland:
    """Starts `atoll join`; its log and its result are beside its state directory."""
    state.parent.mkdir(parents=True, exist_ok=True)
    words = [*program, "join", url, "--worker-id", worker_id, "--state", str(state), *options]
    log_path = state.with_name(state.name + ".log")
    result_path = state.with_name(state.name + ".json")
    popen = _start(
        [*words, "--json"], log_path, result_path, **variables, ATOLL_TOKEN=tokens.worker
    )
    return LocalIsland(worker_id, popen, log_path, result_path=result_path)


def _start(
    words: Sequence[str], log_path: Path, result_path: Path | None = None, **variables: str
) -> "subprocess.Popen[bytes]":
    """Starts a process that writes to its log, and what it prints to `result_path` if given."""
    shown = log_path.open("ab") if result_path is None else result_path.open("wb")
    none, environment = subprocess.DEVNULL, {**os.environ, **variables}
    with log_path.open("ab") as log, shown as result:
        return subprocess.Popen(words, stdin=none, stdout=result, stderr=log, env=environment)
