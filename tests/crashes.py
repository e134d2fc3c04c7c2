"""Drives `tests/faults/crash_run.py`: its undisturbed run, its crash points, and one crash each.

A crash point is one durable call of one thread. The helper says what a crash left behind; whether
that is right is for the tests to say.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from atoll.clock import SystemClock
from tests import strace

PROGRAM = Path(__file__).parent / "faults" / "crash_run.py"
LIMIT_SECONDS = 60.0  # for waits; reached only when something is broken
POLL_SECONDS = 0.002
KILLED = -9
MAIN = "main"

_CLOCK = SystemClock()
# A child that is forked has none of its parent's threads: the libraries must not start any.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# What differs between two runs of the same program: descriptors, process ids, random names.
_VARIES = ((r"\d+<", "<"), (r"/\d+-\d+\.part", "/N.part"), (r"/\.tmp\w+", "/.tmp"))


@dataclass(frozen=True)
class Point:
    """The `number`-th call `name` of a thread; `what` is its arguments without what varies."""

    thread: str
    name: str
    number: int
    what: str

    def __str__(self) -> str:
        return f"{self.name} {self.number} of {self.thread}: {self.what}"


@dataclass(frozen=True)
class Undisturbed:
    """What the run comes to when nobody disturbs it."""

    hashes: list[str]  # of the ledger, after each commit
    digests: list[str]
    receipts: list[str]
    points: list[Point]


@dataclass(frozen=True)
class Crashed:
    """What one kill left behind, and what a restart made of it."""

    code: int
    killed_at: Point | None
    commits: int  # that had returned
    acknowledged: list[str]  # receipts that an island had in hand
    recovery_code: int
    error: str
    found: dict[str, Any] = field(default_factory=dict)
    made: dict[str, Any] = field(default_factory=dict)
    audit: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Refused:
    """What became of a run in which the disk refused a call, and what a restart made of it."""

    code: int
    error: str
    is_injected: bool
    later: list[str]  # the same calls of the same thread after it
    digests: list[str]  # that the run itself came to
    recovery_code: int
    recovery_error: str
    found: dict[str, Any] = field(default_factory=dict)
    made: dict[str, Any] = field(default_factory=dict)
    audit: list[str] = field(default_factory=list)


class CrashRun:
    """The program, warm, and a directory for each of its runs."""

    def __init__(self, process: subprocess.Popen[str], directory: Path) -> None:
        self._process = process
        self._directory = directory
        self._serial = 0

    @classmethod
    @contextmanager
    def started(cls, *, flaw: str | None = None) -> Iterator[Self]:
        """The program after its imports; it and its files are gone after the block."""
        words = [sys.executable, str(PROGRAM), *([flaw] if flaw else [])]
        # A kill is the same on any filesystem, and in memory nobody waits for a disk.
        memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
        with (
            tempfile.TemporaryDirectory(prefix="atoll-crashes-", dir=memory) as directory,
            (
                subprocess.Popen(
                    words,
                    env={**os.environ, **_ONE_THREAD},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    bufsize=1,
                )
            ) as process,
        ):
            assert process.stdout is not None
            assert process.stdin is not None
            try:
                assert process.stdout.readline() == "ready\n", "the program did not start"
                yield cls(process, Path(directory))
                process.stdin.close()
                process.wait(LIMIT_SECONDS)
            finally:
                process.kill()

    def undisturbed(self) -> Undisturbed:
        """One run for what it comes to, one under a tracer for the calls it makes."""
        here = self._place()
        assert self._run(here, hashes=True) == 0, _error(here)
        said = _said(here / "log")
        traced = self._place()
        with self._traced(traced, MAIN, follow=True):
            pass
        again = _said(traced / "log")
        assert _facts(again, "digest") == _facts(said, "digest"), "the run differs from itself"
        return Undisturbed(
            _facts(said, "commit"),
            _facts(said, "digest"),
            _facts(said, "receipt"),
            _points(strace.calls(traced / "trace"), again, home=traced / "home"),
        )

    def crash(self, point: Point) -> Crashed:
        """Kills a run at `point`, then starts it again in the same directory."""
        here = self._place()
        code = self._injected(here, point, f"signal=SIGKILL:when={point.number}", [point.name])
        said = _said(here / "log")
        at = strace.calls(here / "trace")
        recovered, report = self._recovered(here)
        crashed = Crashed(
            code=code,
            killed_at=_killed_at(here, at, point) if at else None,
            commits=sum("commit" in fact for fact in said),
            acknowledged=_facts(said, "receipt"),
            recovery_code=recovered,
            error=_error(here),
            **report,
        )
        shutil.rmtree(here)
        return crashed

    def refuse(self, point: Point, error: str, *, times: int = 1) -> Refused:
        """A run in which the call at `point` (and further ones) fails; then it is started again."""
        here = self._place()
        last = point.number + times - 1
        code = self._injected(
            here, point, f"error={error}:when={point.number}..{last}", [point.name]
        )
        home = here / "home"
        calls = [_plain(call.arguments, home) for call in strace.calls(here / "trace")]
        said, error_text = _said(here / "log"), _error(here)
        recovered, report = self._recovered(here)
        refused = Refused(
            code=code,
            error=error_text,
            is_injected=strace.was_injected(here / "trace"),
            later=calls[point.number :],
            digests=_facts(said, "digest"),
            recovery_code=recovered,
            recovery_error=_error(here),
            **report,
        )
        shutil.rmtree(here)
        return refused

    def _injected(self, here: Path, point: Point, inject: str, calls: list[str]) -> int:
        with self._traced(here, point.thread, calls=calls, inject=inject) as codes:
            return codes[0]

    def _recovered(self, here: Path) -> tuple[int, dict[str, Any]]:
        report = here / "report.json"
        code = self._ask(
            do="recover",
            home=str(here / "home"),
            log=str(here / "recovery"),
            report=str(report),
        )
        return code, json.loads(report.read_text()) if report.exists() else {}

    def _place(self) -> Path:
        self._serial += 1
        place = self._directory / f"{self._serial:04}"
        place.mkdir()
        os.mkfifo(place / "gate")
        return place

    def _run(self, here: Path, **rest: Any) -> int:
        return self._ask(do="run", home=str(here / "home"), log=str(here / "log"), **rest)

    @contextmanager
    def _traced(self, here: Path, thread: str, **tracing: Any) -> Iterator[list[int]]:
        """A run whose `thread` is held until a tracer is attached; the list gets its exit code."""
        job = {"do": "run", "home": str(here / "home"), "log": str(here / "log")}
        self._send({**job, "target": thread, "gate": str(here / "gate")})
        codes: list[int] = []
        with strace.attached(_waiting(here / "log"), here / "trace", **tracing):
            (here / "gate").write_bytes(b"\0")
            codes.append(self._answer())
        yield codes

    def _ask(self, **job: Any) -> int:
        self._send(job)
        return self._answer()

    def _send(self, job: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")

    def _answer(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())


def spread(
    points: Sequence[Point], count: int, *, kind: Callable[[Point], str] = lambda p: p.name
) -> list[Point]:
    """So many points, the same every time: evenly over the run for each kind, rare kinds whole."""
    kinds: dict[str, list[Point]] = {}
    for point in points:
        kinds.setdefault(kind(point), []).append(point)
    chosen: list[Point] = []
    for left, name in enumerate(sorted(kinds, key=lambda n: (len(kinds[n]), n))):
        mine = kinds[name]
        share = -(-(count - len(chosen)) // (len(kinds) - left))
        take = min(share, len(mine))
        chosen += [mine[index * len(mine) // take] for index in range(take)]
    return chosen


def _points(calls: list[strace.Call], said: list[dict[str, Any]], *, home: Path) -> list[Point]:
    names = {fact["tid"]: fact["thread"] for fact in said if "thread" in fact}
    counted: Counter[tuple[str, str]] = Counter()
    points = []
    for call in calls:
        thread = names[call.tid]
        counted[thread, call.name] += 1
        number = counted[thread, call.name]
        points.append(Point(thread, call.name, number, _plain(call.arguments, home)))
    return points


def _killed_at(here: Path, calls: list[strace.Call], point: Point) -> Point | None:
    """Where the tracer says it happened: the last call that it saw of a thread that it killed."""
    if not strace.was_killed(here / "trace"):
        return None
    last = calls[-1]
    what = _plain(last.arguments, here / "home")
    return Point(point.thread, last.name, len(calls), what)


def _plain(arguments: str, home: Path) -> str:
    text = arguments.replace(str(home), "home")
    for pattern, stand_in in _VARIES:
        text = re.sub(pattern, stand_in, text)
    return text


def _said(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def _facts(said: list[dict[str, Any]], name: str) -> list[str]:
    return [fact[name] for fact in said if name in fact]


def _waiting(log: Path) -> int:
    deadline = _CLOCK.now() + LIMIT_SECONDS
    while _CLOCK.now() < deadline:
        for fact in _said(log):
            if "waiting" in fact:
                return int(fact["waiting"])
        _CLOCK.sleep(POLL_SECONDS)
    raise AssertionError(f"the thread to be traced did not come: {_error(log.parent)}")


def _error(here: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(here.glob("*.error")))
