"""Finds what is damaged in a state directory and the last good round, and goes back to it.

Looks at a copy of the ledger, so looking changes nothing. A repair makes a new ledger of what can
be trusted and puts the old one, and every blob that no longer belongs to the run, aside in
`damaged-N/`. Nothing is deleted. A ledger outside the directory is looked at and never changed, and
blobs outside it are moved only when they belong to this ledger.
"""

import contextlib
import shutil
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from atoll import files as filesystem
from atoll.blobs.access import S3Access
from atoll.blobs.base import Blobs
from atoll.errors import StateDamaged, StorageFull
from atoll.launch import repair_cut, repair_swap, state
from atoll.launch.repair_report import RepairReport
from atoll.launch.repair_swap import LEDGER, SCRATCH
from atoll.launch.state import Addresses
from atoll.ledger import engines
from atoll.ledger.sqlite import lock, salvage, wal
from atoll.ledger.sqlite.salvage import Salvaged
from atoll.proof import audit
from atoll.versions import recorded


def look(directory: Path, *, s3: S3Access | None = None) -> RepairReport:
    """What is damaged and how far the run holds; changes nothing. StateHeld when it is in use."""
    with filesystem.naming("look at", directory):
        addresses = state.addresses_of(directory)
        with (
            closing(lock.hold(directory)),
            tempfile.TemporaryDirectory(prefix="atoll-repair-") as scratch,
            closing(state.open_blobs(directory, addresses, s3=s3)) as blobs,
        ):
            return _prepare(directory, addresses, Path(scratch), blobs)


def repair(directory: Path, *, s3: S3Access | None = None) -> RepairReport:
    """Takes a damaged run back to its last good round; ends with an audit that replays."""
    with filesystem.naming("repair", directory):
        addresses = state.addresses_of(directory)
        with closing(lock.hold(directory)):
            repair_swap.resume(directory)
            repair_swap.sweep(directory)
            with (
                tempfile.TemporaryDirectory(prefix=SCRATCH, dir=directory) as scratch,
                closing(state.open_blobs(directory, addresses, s3=s3)) as blobs,
            ):
                report = _prepare(directory, addresses, Path(scratch), blobs)
                if report.sound or not report.repairable:
                    repair_swap.end(directory)
                    return report
                if report.ledger_elsewhere:
                    raise _not_changed(report)
                claim = state.ownership(directory, addresses, ledger=None, s3=s3)
                if claim is not None:
                    claim.claim()  # or a copy would take blobs away that the original needs
                made = Path(scratch) / LEDGER
                if not wal.is_folded(made):  # a full disk leaves a part in its log
                    raise StorageFull(
                        f"no room to write the new ledger beside {str(made)!r}; nothing was "
                        f"changed; free some on that disk and repair again"
                    )
                repair_swap.install(directory, made, blobs, report)
            report.audit = _audited(directory, addresses, s3=s3)
        return report


def _prepare(directory: Path, addresses: Addresses, scratch: Path, blobs: Blobs) -> RepairReport:
    """Makes a repaired ledger in `scratch`, and says what came of making it."""
    report = RepairReport(str(directory), ledger_elsewhere=addresses.ledger is not None)
    original = engines.file_of(addresses.ledger or directory / LEDGER)
    salvaged = None if original is None else _salvage(original, scratch, report)
    if original is None:
        # Its server keeps checksums; what is left to find is in the chain and the blobs.
        with closing(engines.open_ledger(str(addresses.ledger))) as served:
            served.copy_to(str(scratch / LEDGER))
    with closing(engines.open_ledger(scratch / LEDGER)) as ledger:
        repair_cut.cut(ledger, blobs, report, salvaged)
    return report


def _not_changed(report: RepairReport) -> StateDamaged:
    more = f" (and {len(report.damages) - 1} more)" if len(report.damages) > 1 else ""
    return StateDamaged(
        f"{report.damages[0]}{more}; the last good round is {report.last_good}, but this run's "
        f"ledger is not in its state directory and `atoll repair` changes only one that is: "
        f"nothing has been changed, so restore that database or the named blobs from a copy"
    )


def _salvage(original: Path, scratch: Path, report: RepairReport) -> Salvaged:
    """A new ledger of what can be trusted, in `scratch`."""
    torn = wal.check(original)
    report.damages += [] if torn is None else [str(torn)]
    copied = scratch / "damaged.sqlite"
    if original.exists():
        shutil.copyfile(original, copied)
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(wal.path_of(original), wal.path_of(copied))
        report.damages += [f"{str(original)!r}: {line}" for line in salvage.integrity(copied)]
    else:
        report.damages.append(f"{str(original)!r}: it is missing")
    salvaged = salvage.salvage(copied, scratch / LEDGER, name=repr(str(original)))
    report.damages += [
        str(replace(d, ledger=f"the ledger {str(original)!r}")) for d in salvaged.damages
    ]
    report.published = salvaged.published
    return salvaged


def _audited(directory: Path, addresses: Addresses, *, s3: S3Access | None) -> dict[str, object]:
    """An audit of the repaired run, whose blobs are all hashed again by a store of its own."""
    with state.opened(directory, addresses, s3) as (ledger, blobs):
        manifest = recorded.manifest_of(ledger)
        assert manifest is not None
        layout = recorded.layout_of(manifest)
        return audit.audit(ledger, blobs, layout=layout, with_replay=True).as_json()
