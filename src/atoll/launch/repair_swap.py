"""Puts a repaired ledger in the place of a damaged one, in steps that a crash may interrupt.

The old ledger, its log and every blob that no longer belongs to the run move to `damaged-N/`;
nothing is deleted. While it lasts a marker in the directory leads back to the old ledger.
"""

import contextlib
import itertools
import json
import os
import shutil
from pathlib import Path

from atoll import files as filesystem
from atoll.blobs.base import Blobs
from atoll.blobs.directory import DirectoryBlobs
from atoll.errors import BlobChanged, BlobMissing
from atoll.launch import state
from atoll.launch.repair_report import RepairReport

LEDGER = "ledger.sqlite"
SCRATCH = "repair-"  # what a repair works on, beside the ledger
_TEMPORARY = "[a-z0-9_]" * 8  # what tempfile adds to it


def install(directory: Path, made: Path, blobs: Blobs, report: RepairReport) -> None:
    """Puts the old ledger aside and the new one in its place; `resume` follows a crash in it."""
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
        _put_aside(blobs, sha256, folder / "blobs")
    filesystem.sync(folder / "blobs")
    filesystem.sync(folder)
    filesystem.sync(directory)
    end(directory)


def end(directory: Path) -> None:
    """The directory is whole, as it was or repaired; takes the marker away if there is one."""
    marker = directory / state.REPAIR_FILE
    if marker.exists():
        marker.unlink()
        filesystem.sync(directory)


def resume(directory: Path) -> None:
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


def sweep(directory: Path) -> None:
    """Removes what repairs that were killed worked on: copies, each as large as the ledger."""
    for left in directory.glob(f"{SCRATCH}{_TEMPORARY}"):
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
    numbered = (directory / f"damaged-{number}" for number in itertools.count(1))
    folder = next(path for path in numbered if not path.exists())
    folder.mkdir(mode=0o700)
    return folder


def _write(path: Path, value: object) -> None:
    filesystem.write_whole(path, json.dumps(value, indent=2).encode())
