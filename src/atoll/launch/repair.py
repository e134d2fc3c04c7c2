"""What is damaged in a state directory, how far the run holds, and going back there.

Looks at a copy of the ledger, so looking changes nothing. A repair makes a new ledger of what can
be trusted and puts the old one, and every blob that no longer belongs to the run, aside in
`damaged-N/`. Nothing is deleted. A ledger outside the directory is looked at and never changed, and
blobs outside it are moved only when they belong to this ledger.
"""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

from atoll import files as filesystem
from atoll.blobs.access import S3Access
from atoll.blobs.base import Blobs
from atoll.blobs.directory import DirectoryBlobs
from atoll.coordinator.rounds import dispatch
from atoll.errors import AtollError, BlobChanged, BlobMissing, StateDamaged, StorageFull
from atoll.launch import state
from atoll.launch.state import Addresses
from atoll.ledger import chain, engines
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import RoundState
from atoll.ledger.sqlite import lock, salvage, truncation, wal
from atoll.ledger.sqlite.salvage import Counts, Salvaged
from atoll.ledger.tables.transaction import Transaction
from atoll.proof import audit, retention, soundness
from atoll.proof.soundness import Findings
from atoll.versions import recorded
from atoll.versions.manifests import Manifests
from atoll.wire import frame

LEDGER = "ledger.sqlite"
SCRATCH = "repair-"


@dataclass
class RepairReport:
    """What was found, and what a repair does or did about it."""

    directory: str
    run_id: str | None = None
    ledger_elsewhere: bool = False  # then it is looked at and never changed
    damages: list[str] = field(default_factory=list)
    published: int = 0  # the newest version that the ledger tells of
    last_good: int | None = None  # the newest version that can be rebuilt
    replay_from: int = 0  # audit replays from there
    keeps_open: bool = False
    dropped: Counts = field(default_factory=Counts)
    kept: Counts = field(default_factory=Counts)
    dropped_snapshots: list[int] = field(default_factory=list)
    put_aside: list[str] = field(default_factory=list)  # blobs
    weights: list[dict[str, Any]] = field(default_factory=list)  # blobs that hold whole weights
    aside: str | None = None  # the folder, once the repair is done
    audit: dict[str, object] | None = None

    @property
    def sound(self) -> bool:
        return not self.damages

    @property
    def repairable(self) -> bool:
        return self.last_good is not None

    def as_json(self) -> dict[str, object]:
        """The report as plain values."""
        return {**asdict(self), "sound": self.sound, "repairable": self.repairable}


def look(directory: Path, *, pid: int, wall: float, s3: S3Access | None = None) -> RepairReport:
    """What is damaged and how far the run holds; changes nothing. StateHeld when it is in use."""
    with (
        filesystem.naming("look at", directory),
        lock.hold(_existing(directory), pid=pid, wall=wall),
        tempfile.TemporaryDirectory(prefix="atoll-repair-") as scratch,
        _prepared(directory, Path(scratch), s3=s3) as prepared,
    ):
        return prepared.report


def repair(directory: Path, *, pid: int, wall: float, s3: S3Access | None = None) -> RepairReport:
    """Takes a damaged run back to its last good round; ends with an audit that replays."""
    with (
        filesystem.naming("repair", directory),
        lock.hold(_existing(directory), pid=pid, wall=wall),
    ):
        _resume(directory)
        _sweep(directory)
        with (
            tempfile.TemporaryDirectory(prefix=SCRATCH, dir=directory) as scratch,
            _prepared(directory, Path(scratch), s3=s3) as prepared,
        ):
            report = prepared.report
            if report.sound or not report.repairable:
                _end(directory)
                return report
            _check_changeable(report)
            claim = state.ownership(directory, prepared.addresses, ledger=None, s3=s3)
            if claim is not None:
                claim.claim()  # or a copy would take blobs away that the original needs
            _close(prepared)
            _check_whole(Path(scratch) / LEDGER)
            _install(directory, Path(scratch) / LEDGER, prepared)
        report.audit = _audited(directory, prepared.addresses, s3=s3)
    return report


@dataclass
class _Prepared:
    """A repaired ledger beside the damaged one, and what came of making it."""

    report: RepairReport
    addresses: Addresses
    blobs: Blobs
    ledger: Ledger | None


@contextlib.contextmanager
def _prepared(directory: Path, scratch: Path, *, s3: S3Access | None) -> Iterator[_Prepared]:
    addresses = state.addresses_of(directory)
    report = RepairReport(str(directory), ledger_elsewhere=addresses.ledger is not None)
    blobs = state.open_blobs(directory, addresses, s3=s3)
    prepared = _Prepared(report, addresses, blobs, None)
    try:
        original = engines.file_of(addresses.ledger or directory / LEDGER)
        if original is not None:
            salvaged = _salvage(original, scratch, report)
        else:
            # Its server keeps checksums; what is left to find is in the chain and the blobs.
            state_copy = engines.open_ledger(str(addresses.ledger))
            state_copy.copy_to(str(scratch / LEDGER))
            state_copy.close()
            salvaged = None
        prepared.ledger = engines.open_ledger(scratch / LEDGER)
        _cut(prepared.ledger, blobs, report, salvaged)
        yield prepared
    finally:
        _close(prepared)
        blobs.close()


def _close(prepared: _Prepared) -> None:
    if prepared.ledger is not None:
        prepared.ledger.close()


def _check_whole(made: Path) -> None:
    """Refuses a new ledger of which some is still in its log: a full disk leaves it there."""
    if not wal.is_folded(made):
        raise StorageFull(
            f"no room to write the new ledger beside {str(made)!r}; nothing was changed; free some "
            f"on that disk and repair again"
        )


def _check_changeable(report: RepairReport) -> None:
    if report.ledger_elsewhere:
        more = f" (and {len(report.damages) - 1} more)" if len(report.damages) > 1 else ""
        raise StateDamaged(
            f"{report.damages[0]}{more}; the last good round is {report.last_good}, but this run's "
            f"ledger is not in its state directory and `atoll repair` changes only one that is: "
            f"nothing has been changed, so restore that database or the named blobs from a copy"
        )


def _existing(directory: Path) -> Path:
    state.addresses_of(directory)
    return directory


def _salvage(original: Path, scratch: Path, report: RepairReport) -> Salvaged:
    """A new ledger of what can be trusted, in `scratch`."""
    torn = wal.check(original)
    if torn is not None:
        report.damages.append(str(torn))
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


def _cut(ledger: Ledger, blobs: Blobs, report: RepairReport, salvaged: Salvaged | None) -> None:
    """Takes the new ledger back to the last good round; fills the report."""
    was_damaged = bool(report.damages)
    report.weights = _whole_weights(blobs)
    with ledger.writing() as t:
        run, rounds, found = t.run.get(), t.rounds.all(), salvage.counts(t)
        is_left = _heal_chain(t, report)
        if is_left and not report.sound:
            _renew_work(t)
    before = found if salvaged is None else salvaged.counts
    published = [r.round for r in rounds if r.state is RoundState.PUBLISHED]
    told = max([report.published, *published]) + 1  # with the round that was open
    if run is None or not is_left:
        if run is not None or was_damaged or report.weights:
            report.damages = report.damages or [
                "the ledger holds no run, and blobs of one are here"
            ]
        return
    report.run_id = run.run_id
    layout = recorded.layout_of(Manifests.of(ledger).newest.manifest)
    findings = soundness.examine(ledger, blobs, layout=layout, told=told if report.damages else 0)
    report.damages += [str(damage) for damage in findings.damages]
    report.published = max(report.published, findings.published)
    report.last_good = findings.last_good
    if findings.last_good is None or report.sound:
        with ledger.reading() as t:
            report.kept = salvage.counts(t)
        return
    report.replay_from = findings.replay_from
    with ledger.writing() as t:
        gone = {s.version for s in t.snapshots.all() if s.version > findings.last_good}
        _go_back(t, findings)
        latest = t.rounds.latest()
        report.kept = salvage.counts(t)
    report.dropped_snapshots = sorted(gone | findings.bad_snapshots)
    report.put_aside = sorted(
        _blobs_of_no_use(ledger, blobs, findings) & {ref.sha256 for ref in blobs.stored()}
    )
    report.keeps_open = latest is not None and latest.round > findings.last_good
    report.dropped = Counts(
        *(max(0, a - b) for a, b in zip(astuple(before), astuple(report.kept), strict=True))
    )


def _heal_chain(t: Transaction, report: RepairReport) -> bool:
    """Cuts the ledger where its chain breaks; whether a run is left."""
    run, manifests = t.run.get(), t.manifests.all()
    if run is None:
        return False
    broken = chain.check_chain(run, manifests, t.rounds.all(), t.contributions.of_round)
    if broken is None:
        return True
    report.damages.append(f"the ledger's hash chain, {broken.field}: {broken.reason}")
    is_first = bool(manifests) and broken.field == "manifest body" and broken.round <= 1
    if broken.round == 0 or is_first or (broken.round == 1 and broken.field == "prev_hash"):
        return False
    truncation.truncate(t, last_round=broken.round - 1)
    return chain.check_chain(run, manifests, t.rounds.all(), t.contributions.of_round) is None


def _renew_work(t: Transaction) -> None:
    """Datasets and queues that were left out, from the manifest and the leases."""
    manifests = Manifests(t.manifests.all())
    known = dispatch.add_datasets(t, manifests.first.manifest)
    t.queues.rebuild()
    t.queues.open(
        [
            dispatch.queue_of(part, seed, epoch, manifests.of_round(first).manifest)
            for dataset_id, seed, epoch, first in t.queues.without_entry()
            for part in known
            if part.dataset_id == dataset_id
        ]
    )


def _go_back(t: Transaction, findings: Findings) -> None:
    assert findings.last_good is not None
    if not findings.keeps_open:
        truncation.truncate(t, last_round=findings.last_good)
    for version in findings.bad_snapshots:
        t.snapshots.drop(version)
    truncation.disband(t)
    storage = retention.storage_of(t.rounds.all(), Manifests(t.manifests.all()))
    kept = retention.kept_from(t, storage)
    # In place of what an earlier repair recorded, which may lie beyond the last good round.
    later = str(findings.replay_from) if findings.replay_from > kept else None
    t.control.set({retention.REPLAY_FROM: later})


def _blobs_of_no_use(ledger: Ledger, blobs: Blobs, findings: Findings) -> set[str]:
    """Damaged ones, and those of rounds that are no longer there."""
    with ledger.reading() as t:
        needed = retention.referenced(t, None) - findings.bad_blobs
    newer = soundness.newer_blobs(ledger, blobs)
    return (findings.bad_blobs | newer) - needed | _changed(blobs)


def _changed(blobs: Blobs) -> set[str]:
    """Stored blobs that are not what their names say."""
    found = set()
    for ref in blobs.stored():
        try:
            blobs.open(ref.sha256).close()
        except AtollError:
            found.add(ref.sha256)
    return found


def _whole_weights(blobs: Blobs) -> list[dict[str, Any]]:
    """What is left for `atoll export` where no ledger is: blobs that hold whole weights."""
    found = []
    for ref in blobs.stored():
        with contextlib.suppress(AtollError), blobs.open(ref.sha256) as reader:
            header, _ = frame.read_preamble(reader)
            if header.kind == "weights":
                digest = header.result_digest or ""
                kind = "weights" if digest.strip("0") else "outer optimizer state"
                found.append(
                    {"blob": ref.sha256, "version": header.round, "digest": digest, "kind": kind}
                )
    return sorted(found, key=lambda item: (item["version"], item["blob"]))


# Changing the directory


def _install(directory: Path, made: Path, prepared: _Prepared) -> None:
    """Puts the old ledger aside and the new one in its place, so that a crash can be taken up."""
    report = prepared.report
    folder = _new_folder(directory)
    report.aside = str(folder)
    for name in (LEDGER, f"{LEDGER}-wal"):
        with contextlib.suppress(FileNotFoundError):
            os.link(directory / name, folder / name)
    _write(folder / "report.json", report.as_json())  # with it the names of the two are sure
    _write(directory / state.REPAIR_FILE, {"folder": folder.name})
    # From here on the marker leads back to the old ledger, so these need no order on the disk.
    (directory / f"{LEDGER}-wal").unlink(missing_ok=True)
    os.replace(made, directory / LEDGER)  # its bytes are sure: SQLite has closed it
    (folder / "blobs").mkdir()
    for sha256 in report.put_aside:
        _put_aside(prepared.blobs, sha256, folder / "blobs")
    filesystem.sync(folder / "blobs")
    filesystem.sync(folder)
    filesystem.sync(directory)
    _end(directory)


def _end(directory: Path) -> None:
    """The directory is whole, as it was or repaired; takes the marker away if there is one."""
    marker = directory / state.REPAIR_FILE
    if marker.exists():
        marker.unlink()
        filesystem.sync(directory)


def _resume(directory: Path) -> None:
    """After a repair that was cut off: the old ledger is put back, and all is looked at again.

    The marker stays until this repair puts its own in its place, or ends.
    """
    marker = directory / state.REPAIR_FILE
    if not marker.exists():
        return
    folder = directory / str(json.loads(marker.read_text())["folder"])
    if (folder / LEDGER).exists():
        _put_back(folder, directory)
    filesystem.sync(directory)


def _sweep(directory: Path) -> None:
    """Removes what repairs that were killed worked on: copies, each as large as the ledger."""
    for left in directory.glob(f"{SCRATCH}*"):
        shutil.rmtree(left)


def _put_back(folder: Path, directory: Path) -> None:
    for name in (LEDGER, f"{LEDGER}-wal"):
        (directory / name).unlink(missing_ok=True)
    for name in (f"{LEDGER}-wal", LEDGER):
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(folder / name, directory / name)
            filesystem.sync(directory / name)


def _put_aside(blobs: Blobs, sha256: str, folder: Path) -> None:
    kept = folder / sha256
    if isinstance(blobs, DirectoryBlobs):
        blobs.put_aside(sha256, folder)
        if kept.exists():
            filesystem.sync(kept)  # it was copied where the folder is on another disk
        return
    with contextlib.suppress(BlobChanged, BlobMissing):  # that stays where it is
        with blobs.open(sha256) as reader, kept.open("wb") as file:
            for offset in range(0, reader.nbytes, 1 << 20):
                file.write(reader.read(offset, min(1 << 20, reader.nbytes - offset)))
        filesystem.sync(kept)  # before the only other copy goes
        blobs.delete(sha256)


def _new_folder(directory: Path) -> Path:
    number = 1
    while (directory / f"damaged-{number}").exists():
        number += 1
    folder = directory / f"damaged-{number}"
    folder.mkdir(mode=0o700)
    return folder


def _write(path: Path, value: object) -> None:
    filesystem.write_whole(path, json.dumps(value, indent=2).encode())


def _audited(directory: Path, addresses: Addresses, *, s3: S3Access | None) -> dict[str, object]:
    ledger = engines.open_ledger(directory / LEDGER)
    blobs = state.open_blobs(directory, addresses, s3=s3)
    try:
        manifest = recorded.manifest_of(ledger)
        assert manifest is not None
        layout = recorded.layout_of(manifest)
        return audit.audit(ledger, blobs, layout=layout, with_replay=True).as_json()
    finally:
        ledger.close()
        blobs.close()
