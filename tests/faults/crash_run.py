"""A three-round run in one process whose durable calls can be traced and killed one by one.

    crash_run.py [FLAW]

Imports everything, says `ready`, then serves jobs: each line on stdin is a job in JSON, done by a
forked child, and answered by one line with its exit code. The coordinator and two islands are the
real ones with real files in `home`; messages are calls, and time is virtual, so every child makes
the same calls in the same order. What is acknowledged goes to `log`, outside of `home`. Jobs:

    run       the run, from whatever is in `home`; with `target` the named thread waits for a tracer
    recover   looks at a copy of `home`, lets the run complete in it, audits with replay; `report`

A FLAW patches production code, for the control that shows what the checks find.

Announcements use writev, which nobody traces: the counts are those of the run alone.
"""

import json
import os
import shutil
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from atoll import config
from atoll.blobs.directory import DirectoryBlobs
from atoll.config import RunFile
from atoll.coordinator.rounds.rounds import Rounds
from atoll.coordinator.rounds.run_weights import RunWeights
from atoll.coordinator.service import Coordinator
from atoll.errors import StoreError
from atoll.files import SystemFiles
from atoll.island.state import store as island_store
from atoll.island.state.continuity import Continuity
from atoll.island.state.store import IslandStore
from atoll.ledger import engines
from atoll.ledger.connection import Connection
from atoll.ledger.database import Database
from atoll.ledger.records import ContributionRecord, RoundState
from atoll.ledger.tables.transaction import Transaction
from atoll.proof import audit
from atoll.simulate import cluster as simulation
from atoll.simulate.fibers import Fiber, Scheduler
from atoll.simulate.link import MemoryLink
from atoll.versions import recorded
from atoll.versions.manifests import Manifests
from atoll.wire.header import FrameHeader

ROUNDS = 3
ISLANDS = 2
MAIN = "main"
BEFORE_THE_RUN = "before the run"

TABLE: dict[str, Any] = {
    "name": "crash-points",
    "seed": 3,
    "sync_every": 2,
    "model": {
        "architecture": "gpt",
        "vocab": 16,
        "block": 8,
        "layers": 1,
        "heads": 2,
        "width": 8,
    },
    "data": {
        "kind": "synthetic",
        "seed": 1,
        "rows": 500,
        "held_out_rows": 4,
        "block": 8,
        "vocab": 16,
    },
    "inner": {"batch": 2, "lr": 0.01},
    # Both lossy: a residual and a published copy are part of what must survive.
    "upload": {"codec": "int8"},
    "download": {"codec": "bf16"},
    "membership": {"min_workers": ISLANDS},
    "evaluate": {"every": 1},
    "stop": {"rounds": ROUNDS},
    # A snapshot a round, and old ones dropped: deletions are among the calls.
    "storage": {"snapshot_every": 1, "retain": "snapshots", "keep_snapshots": 2},
}


def run_file() -> RunFile:
    return config.parse(TABLE)


class Log:
    """Lines that are out of this process when `say` returns."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def say(self, **facts: object) -> None:
        os.writev(self._fd, [json.dumps(facts).encode() + b"\n"])


# Jobs, each in a process of its own


def run(home: Path, log: Log, *, target: str | None, gate: Path | None, hashes: bool) -> None:
    """The whole run, with acknowledgements in `log`."""
    _log_commits(log, hashes=hashes)
    _log_receipts(log)
    _log_threads(log, target, gate)

    def progress(status: Any) -> None:
        log.say(published=status.version, digest=status.digest)

    simulation.simulate(run_file(), islands=ISLANDS, directory=home, progress=progress)
    log.say(finished=True)


def _log_commits(log: Log, *, hashes: bool) -> None:
    writing = Database.writing

    @contextmanager
    def logged(self: Database) -> Iterator[Connection]:
        with writing(self) as connection:
            yield connection
        log.say(commit=_state_hash(self) if hashes else None)

    Database.writing = logged  # type: ignore[method-assign] # the point of this program


def _state_hash(database: Database) -> str:
    try:
        with database.reading() as connection:
            t = Transaction(connection)
            return BEFORE_THE_RUN if t.run.get() is None else t.state_hash()
    except StoreError:
        return BEFORE_THE_RUN


def _log_receipts(log: Log) -> None:
    upload = MemoryLink.upload

    def logged(self: MemoryLink, identity: Any, frame: Any, **rest: Any) -> str:
        receipt = upload(self, identity, frame, **rest)
        log.say(receipt=receipt, worker=identity.worker_id)
        return receipt

    MemoryLink.upload = logged  # type: ignore[method-assign] # the point of this program


def _log_threads(log: Log, target: str | None, gate: Path | None) -> None:
    """Names every thread that makes durable calls, and holds the target until it is traced."""

    def announce(name: str) -> None:
        log.say(thread=name, tid=threading.get_native_id())
        if name == target:
            _await_tracer(log, gate)

    spawn, save = Scheduler.spawn, Continuity.save

    def spawned(self: Scheduler, name: str, work: Callable[[], None]) -> Fiber:
        def announced() -> None:
            announce(name)
            work()

        return spawn(self, name, announced)

    def saved(self: Continuity, path: Path, *rest: Any) -> None:
        announce(f"{path.parent.name} saves {path.name}")
        save(self, path, *rest)

    Scheduler.spawn = spawned  # type: ignore[method-assign] # the point of this program
    Continuity.save = saved  # type: ignore[method-assign,assignment] # the point of this program
    announce(MAIN)


def _await_tracer(log: Log, gate: Path | None) -> None:
    """Stands still until the other side opens the gate, a named pipe."""
    assert gate is not None
    log.say(waiting=threading.get_native_id())
    fd = os.open(gate, os.O_RDONLY)
    os.read(fd, 1)
    os.close(fd)


def recover(home: Path, log: Log, report: Path) -> None:
    """What a restart finds and what it makes of it."""
    found = _look(home)
    run(home, log, target=None, gate=None, hashes=False)
    made = _look(home)
    report.write_text(json.dumps({"found": found, "made": made, "audit": _audit(home)}))


def _look(home: Path) -> dict[str, Any]:
    """The durable state, looked at in a copy: looking must not recover anything in the original."""
    copy = home.with_name(f"{home.name}-copy")
    shutil.copytree(home, copy)
    try:
        ledger = engines.open_ledger(copy / "ledger.sqlite")
        try:
            with ledger.reading() as t:
                began, records = t.run.get() is not None, t.rounds.all()
                receipts = [c.receipt for r in records for c in t.contributions.of_round(r.round)]
            return {
                "hash": ledger.state_hash() if began else BEFORE_THE_RUN,
                "receipts": receipts,
                "digests": [r.master_digest for r in records if r.state is RoundState.PUBLISHED],
                "islands": [_island(path) for path in sorted(copy.glob("island-*"))],
            }
        finally:
            ledger.close()
    finally:
        shutil.rmtree(copy)


def _island(directory: Path) -> list[int | None]:
    """The rounds of an island's checkpoint and pending state, which must be readable."""
    store = IslandStore(directory)
    try:
        checkpoint, pending = store.checkpoint(), store.rounds()[1]
        waiting = [store.pending(number).round for number in pending]
        return [None if checkpoint is None else checkpoint.round, *waiting]
    finally:
        store.close()


def _audit(home: Path) -> list[str]:
    """What an audit with replay holds against the run."""
    ledger = engines.open_ledger(home / "ledger.sqlite")
    blobs = DirectoryBlobs(home / "blobs")
    try:
        layout = recorded.layout_of(Manifests.of(ledger).newest.manifest)
        found = audit.audit(ledger, blobs, layout=layout, with_replay=True)
        assert found.replayed_rounds, found
        return [str(problem) for problem in found.problems]
    finally:
        blobs.close()
        ledger.close()


# Flaws


def ack_before_commit() -> None:
    """A contribution is acknowledged first and recorded when the coordinator next looks."""
    accept, advance = Rounds.accept, Coordinator.advance
    waiting: list[tuple[Rounds, ContributionRecord, FrameHeader]] = []

    def early(
        self: Rounds,
        contribution: ContributionRecord,
        header: FrameHeader,
        announcement: object = None,  # of uploads there is none
    ) -> ContributionRecord:
        waiting.append((self, contribution, header))
        return contribution

    def late(self: Coordinator) -> bool:
        while waiting:
            accept(*waiting.pop(0))
        return advance(self)

    Rounds.accept = early  # type: ignore[method-assign] # the point of this program
    Coordinator.advance = late  # type: ignore[method-assign, assignment] # the point of this program


def _replace(owner: object, name: str, value: object) -> None:
    setattr(owner, name, value)


def write_in_place() -> None:
    """Small files of an island are written under their own name, not beside it and renamed."""

    def in_place(path: Path, value: Mapping[str, Any]) -> None:
        with path.open("w") as file:
            json.dump(value, file)
            file.flush()
            os.fsync(file.fileno())

    _replace(island_store, "_write_json", in_place)


def weights_left_torn() -> None:
    """A round that found no room halfway is computed again on top of itself."""

    def left(self: RunWeights) -> None:
        del self

    _replace(RunWeights, "_mend", left)


def sync_again() -> None:
    """A sync that failed is repeated, and believed."""
    sync_file = SystemFiles.sync_file

    def repeated(self: SystemFiles, fd: int) -> None:
        try:
            sync_file(self, fd)
        except OSError:
            sync_file(self, fd)

    SystemFiles.sync_file = repeated  # type: ignore[method-assign] # the point of this program


FLAWS = {
    flaw.__name__: flaw
    for flaw in (ack_before_commit, write_in_place, weights_left_torn, sync_again)
}


# The server


def _warm() -> None:
    """Loads what a run loads: a whole one, whose threads have all ended before the first fork."""
    torch.set_num_threads(1)
    simulation.simulate(run_file(), islands=ISLANDS)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a child would lack the threads {threads}"


def _do(job: dict[str, Any]) -> None:
    home, log = Path(job["home"]), Log(Path(job["log"]))
    match job["do"]:
        case "run":
            gate = job.get("gate")
            run(
                home,
                log,
                target=job.get("target"),
                gate=None if gate is None else Path(gate),
                hashes=job.get("hashes", False),
            )
        case "recover":
            recover(home, log, Path(job["report"]))


def _child(job: dict[str, Any]) -> int:
    try:
        _do(job)
        return 0
    except BaseException:
        Path(job["log"]).with_suffix(".error").write_text(traceback.format_exc())
        return 1


def main() -> None:
    if len(sys.argv) > 1:
        FLAWS[sys.argv[1]]()
    _warm()
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os._exit(_child(job))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
