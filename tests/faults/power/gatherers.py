"""The part of the recorded program that is a gather: keys, peers' objects, windows, artifacts.

One machine makes keys, publishes for two peers and gathers; its bucket is on a disk of its own.
Started again on what a power cut left, the same steps go on to the same weights.
"""

import hashlib
import tempfile
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file

from atoll import files
from atoll.clock import SystemClock
from atoll.collectives.local import LocalGroup
from atoll.collectives.runners import Inline
from atoll.gather.keys import SecretKey
from atoll.launch import gather as launching
from atoll.launch import gather_publish
from atoll.launch.gather_file import ArchiveTable, GatherFile, GatherTable
from atoll.launch.gather_state import GatherState
from atoll.layout import Layout
from tests.faults.power import machines
from tests.faults.power.marks import Marks

WINDOWS = 2
PEERS = ("a", "b")
KEYS = (*PEERS, "group")
SHAPES = {"first": (50, 90), "second": (17,)}  # two chunks, five pages of weights
CLOCK = SystemClock()


class Unmarked(Marks):
    """For a run of which nobody asks what it promised."""

    def __init__(self) -> None:
        pass

    def write(self, **fields: object) -> None:
        pass


def run(root: Path, marks: Marks) -> str:
    """Starts on what is below `root`, or from nothing; the digest after the last window."""
    with tempfile.TemporaryDirectory() as elsewhere:
        given = Path(elsewhere)
        for name in (f"{uid}-{window}" for uid in PEERS for window in range(WINDOWS)):
            _drawn(given / f"{name}.safetensors")
        _make_keys(root, marks)
        file = file_of(root, _drawn(given / "start.safetensors"))
        state = GatherState(file.state, file.layout)
        state.begin(file.start)
        before = state.whole()
        marks.write(machine="gatherer", stands=[before.window, before.digest])
        for window in range(before.window, WINDOWS):
            for uid in PEERS:
                _publish(root, file, uid, given / f"{uid}-{window}.safetensors", marks)
            _gather(file, marks)
        return state.whole().digest


def _make_keys(root: Path, marks: Marks) -> None:
    home = root / machines.GATHERER / "keys"
    files.make_directories(home)
    for name in KEYS:
        path = home / f"{name}.key"
        if not path.exists():
            secret(name).save(path)
        marks.write(machine="gatherer", key=name)


def _publish(root: Path, file: GatherFile, uid: str, displacement: Path, marks: Marks) -> None:
    told = gather_publish.publish(
        file,
        uid,
        displacement,
        secret=root / machines.GATHERER / "keys" / f"{uid}.key",
        sample_digest="0" * 64,
        clock=CLOCK,
        s3=None,
        residual=residual_of(root, uid),
    )
    marks.write(machine="bucket", stated=[uid, told["window"], told["sha256"]])
    marks.write(machine="gatherer", left=[uid, told["window"], told["sha256"]])


def _gather(file: GatherFile, marks: Marks) -> None:
    group = LocalGroup(1, clock=CLOCK).rank(0, Inline(), way="direct", timeout_seconds=60.0)
    told = launching.window(file, group, clock=CLOCK, s3=None)
    assert told["uids"] == list(PEERS), told
    marks.write(machine="bucket", recorded=[told["window"], told["artifact"]])
    marks.write(machine="gatherer", stands=[told["window"] + 1, told["digest"]])


def file_of(root: Path, start: Path) -> GatherFile:
    """The gather file, below `root` but for the weights that it starts from."""

    def listed(uid: str) -> dict[str, str]:
        return {"uid": uid, "key": secret(uid).public.hex, "bucket": "main", "prefix": uid}

    table = GatherTable(
        run_id="power",
        start=str(start),
        state=str(machines.GATHERER / "state"),
        outer_lr=0.5,
        seconds=60.0,
        buckets={"main": str(machines.BUCKET)},
        archive=ArchiveTable(
            bucket="main",
            prefix="archive",
            key=secret("group").public.hex,
            secret=str(machines.GATHERER / "keys" / "group.key"),
        ),
        primaries=[listed(uid) for uid in PEERS],
    )
    return GatherFile(table, root)


def residual_of(root: Path, uid: str) -> Path:
    """The file of what a peer has not sent yet."""
    return root / machines.GATHERER / "keys" / f"{uid}.residual"


def secret(name: str) -> SecretKey:
    return SecretKey(hashlib.sha256(name.encode()).digest())


@cache
def manifest_sha256() -> str:
    """Of the gather file."""
    with tempfile.TemporaryDirectory() as elsewhere:
        start = _drawn(Path(elsewhere) / "start.safetensors")
        return file_of(Path(elsewhere), start).manifest_sha256


@cache
def layout() -> Layout:
    """Of the weights."""
    return Layout.of((name, shape, "float32") for name, shape in sorted(SHAPES.items()))


def _drawn(path: Path) -> Path:
    made = torch.Generator().manual_seed(int.from_bytes(path.stem.encode(), "big") % 2**32)
    values = {name: torch.randn(shape, generator=made) for name, shape in SHAPES.items()}
    save_file(values, str(path))
    return path
