"""The part of the recorded program that damages a run and repairs it, and drops one.

Both work on copies of the finished run, on disks of their own, which are sure before they begin.
"""

import contextlib
import datetime
import os
import shutil
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

from atoll.launch import repair, repair_swap, reset, state
from atoll.ledger import engines
from atoll.wire import certificate
from tests.faults.power import machines
from tests.faults.power.marks import Marks
from tests.faults.power.promises import sha256_of
from tests.ledgers import alone

LEDGER = "ledger.sqlite"
WAL = f"{LEDGER}-wal"
STRAY = "0" * 64  # a blob that is not what its name says
_sync = os.fsync  # before it is wrapped: what is made ready here is none of our own sites


class _CutOff(Exception):
    """Ends a repair in the middle."""


def repair_twice(root: Path, marks: Marks) -> None:
    """A repair that is cut off after the new ledger is in place, and one that takes it up."""
    home = root / machines.REPAIRED
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "state"
        _copy_run(root, made)
        (made / "blobs" / STRAY[:2]).mkdir(exist_ok=True)
        (made / "blobs" / STRAY[:2] / STRAY).write_bytes(b"changed")
        with contextlib.closing(sqlite3.connect(made / LEDGER)) as raw:
            raw.execute("UPDATE generations SET members = '[' WHERE number = 1")
            raw.commit()
        ledger = engines.open_ledger(made / LEDGER)
        alone(ledger).control.set({"kept": "in the log"})
        newest = alone(ledger).rounds.all()[-1]
        _copy_surely(made, home, root)  # the log goes with it: nobody has closed the ledger
        ledger.close()
    marks.write(
        machine="repaired",
        damaged=newest.round,
        digest=newest.master_digest,
        kept="in the log",
        aside={name: sha256_of(home / name) for name in (LEDGER, WAL)},
    )
    _tell_steps(home, marks)
    whole = repair_swap._put_aside

    def cut_off(*_: Any) -> None:
        setattr(repair_swap, "_put_aside", whole)  # noqa: B010
        raise _CutOff

    setattr(repair_swap, "_put_aside", cut_off)  # noqa: B010
    with contextlib.suppress(_CutOff):
        repair.repair(home)
    report = repair.repair(home)
    assert report.last_good == newest.round, report
    assert report.put_aside == [STRAY], report


def _tell_steps(home: Path, marks: Marks) -> None:
    """The moment from which a repair can be taken up, and the one from which it has to last."""
    write, end = repair_swap._write, repair_swap.end

    def noting(path: Path, value: object) -> None:
        write(path, value)
        if path.name == state.REPAIR_FILE:
            marks.write(machine="repaired", noted=str(value), aside={})

    def ending(directory: Path) -> None:
        end(directory)
        stray = f"blobs/{STRAY}"
        [path] = home.glob(f"damaged-*/{stray}")
        marks.write(machine="repaired", repaired=True, aside={stray: sha256_of(path)})

    setattr(repair_swap, "_write", noting)  # noqa: B010
    setattr(repair_swap, "end", ending)  # noqa: B010


def start_over(root: Path, marks: Marks) -> None:
    """What `atoll serve --reset` does before it begins anew."""
    home = root / machines.RESET
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "state"
        _copy_run(root, made)
        ledger = engines.open_ledger(made / LEDGER)
        told = ledger.state_hash()
        ledger.close()
        _copy_surely(made, home, root)
    now = datetime.datetime.fromtimestamp(machines.WALL, tz=datetime.UTC)
    pinned = certificate.own(home, host="127.0.0.1", now=now).fingerprint
    keys = sorted(reset.CERTIFICATE_FILES)
    marks.write(machine="reset", told=told, pinned=pinned, keys=keys)
    dropped = reset.put_aside(home)
    marks.write(machine="reset", dropped=dropped.name)


def _copy_run(root: Path, target: Path) -> None:
    passing = shutil.ignore_patterns("spool", "telemetry*", "*.lock")
    shutil.copytree(root / machines.COORDINATOR, target, ignore=passing)


def _copy_surely(source: Path, target: Path, root: Path) -> None:
    target.parent.mkdir()
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.lock"))
    for path in [root, target.parent, target, *target.rglob("*")]:
        fd = os.open(path, os.O_RDONLY)
        _sync(fd)
        os.close(fd)
