"""What an island keeps on its own disk: who it is, what it sent, and where its training stands.

    identity.json            worker_id and island key
    checkpoint-N/            inner state after accepted round N (at most one, the newest)
    pending-N/               the same for each round whose receipt is not here yet, with the body
                             of its frame; the preamble is in complete.json
    spare-*                  large files that are done with, to be written over by the next round
    rank-R/                  the same for a follower of a torchrun group: its inner state, no frame

A directory counts once `complete.json` is in it, which is written last. A receipt promotes the
pending directory to the checkpoint by one rename; a refusal removes it. The coordinator's ledger
is the truth: losing this directory costs repeated work, never the run.
"""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from atoll import files as filesystem
from atoll import own_directory
from atoll.clock import Clock, SystemClock
from atoll.errors import StateHeld, StoreError
from atoll.island.state import patience
from atoll.island.state.base import FRAME_FILE, RESIDUAL_FILE, STATE_FILE, Saved
from atoll.island.state.patience import patient

MAX_JSON_BYTES = 8 << 20
SPARE = "spare-"
_WAY_OUT = (
    "see that the disk has room and works, then start this island again: it goes on from the last "
    "round that it has whole"
)


@dataclass(frozen=True)
class IslandIdentity:
    """Who this island is to the coordinator, over restarts."""

    worker_id: str
    island_key: str


class StoredFrame:
    """A frame: its preamble, and its body in a file; fulfils `base.Frame`. Read from any thread."""

    def __init__(self, path: Path, *, preamble: bytes, sha256: str) -> None:
        self.preamble = preamble
        self.sha256 = sha256
        self.nbytes = len(preamble) + path.stat().st_size
        self._fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Up to `nbytes` from `offset`."""
        head = self.preamble[offset : offset + nbytes]
        begin = max(0, offset - len(self.preamble))
        return head + os.pread(self._fd, nbytes - len(head), begin)

    def close(self) -> None:
        """Closes the file; safe to repeat."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class IslandStore:
    """One island's directory, held by one process; fulfils `base.Store`.

    For one thread at a time: the one that sends, or the one that trains while that one rests.
    `complete` alone may run beside it, while it reads the frame. While no file can be opened, its
    methods wait.
    """

    def __init__(
        self, directory: Path, *, has_frames: bool = True, clock: Clock | None = None
    ) -> None:
        self.clock: Clock = clock or SystemClock()
        self._has_frames = has_frames  # False: a follower's, which keeps inner state alone
        filesystem.make_directories(directory.absolute())
        own_directory.check(directory, option="--state")
        self.directory = directory
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._lock = os.open(directory / "lock", flags, 0o600)
        except OSError as exc:
            raise StoreError(
                f"island directory {str(directory)!r} cannot be used ({exc.strerror}); it must be "
                f"a directory that can be written to, so choose another --state"
            ) from exc
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            os.close(self._lock)
            raise StateHeld(
                f"island directory {str(directory)!r} is held by another process; "
                f"give this island another --state directory"
            ) from exc
        self._remove_unfinished()

    def close(self) -> None:
        """Lets the directory go."""
        os.close(self._lock)

    @patient
    def identity(self) -> IslandIdentity | None:
        """Who this directory belongs to, if it was used before."""
        path = self.directory / "identity.json"
        if not path.exists():
            return None
        kept = _read_json(path)
        return IslandIdentity(str(kept["worker_id"]), str(kept["island_key"]))

    @patient
    def set_identity(self, identity: IslandIdentity) -> None:
        """Remembers who this island is."""
        _write_json(self.directory / "identity.json", asdict(identity))

    # Pending and checkpoint directories

    @patient
    def begin(self, round_number: int) -> Path:
        """An empty directory for what is about to be sent."""
        path = self.directory / f"pending-{round_number}"
        if path.exists():
            self._remove(path)  # of an earlier try
        with _own_disk(path):
            path.mkdir(mode=0o700)
            for name in (FRAME_FILE, RESIDUAL_FILE):
                with suppress(FileNotFoundError):
                    os.replace(self.directory / f"{SPARE}{name}", path / name)
        return path

    @contextmanager
    def writing(self, path: Path) -> Iterator[BinaryIO]:
        """A file of a pending directory, to be written from its start to its new end, and read.

        A spare one is written over: its pages and blocks are there already, which costs half.
        """
        with _own_disk(path), os.fdopen(self._opened(path), "w+b") as file:
            yield file
            file.truncate()

    @patient
    def _opened(self, path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    @patient
    def complete(self, path: Path, meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Writes the inner state and makes the whole directory durable."""
        with _own_disk(path):
            save_file(dict(tensors), str(path / STATE_FILE))
            for file in path.iterdir():
                filesystem.sync(file, way_out=_WAY_OUT)
            # The names before the one that vouches for them.
            filesystem.sync(path, way_out=_WAY_OUT)
            _write_json(path / "complete.json", dict(meta))
            filesystem.sync(self.directory, way_out=_WAY_OUT)

    @patient
    def pending(self, round_number: int) -> Saved:
        """What was complete for a round, but has no receipt yet."""
        return self._read("pending", round_number)

    @patient
    def checkpoint(self) -> Saved | None:
        """The inner state after the newest accepted round."""
        newest, _ = self.rounds()
        return None if newest is None else self._read("checkpoint", newest)

    @patient
    def frame(self, saved: Saved) -> StoredFrame:
        """The frame of a pending round."""
        return StoredFrame(
            self.directory / f"pending-{saved.round}" / FRAME_FILE,
            preamble=bytes.fromhex(saved.meta["preamble"]),
            sha256=saved.meta["sha256"],
        )

    @patient
    def promote(self, round_number: int) -> None:
        """The receipt is here: the pending state becomes the checkpoint."""
        promoted = self.directory / f"checkpoint-{round_number}"
        pending = self.directory / f"pending-{round_number}"
        # Not so when it is tried again after the rename, for want of a file to sync it with.
        if promoted.exists() and pending.exists():
            self._remove(promoted)  # of a history that the coordinator has lost
        older = [path for path in self._named("checkpoint") if path != promoted]
        with _own_disk(promoted):
            if pending.exists() or not promoted.exists():
                os.replace(pending, promoted)
            filesystem.sync(self.directory, way_out=_WAY_OUT)
        self._spare(promoted / FRAME_FILE)
        for path in older:
            for name in (FRAME_FILE, RESIDUAL_FILE):
                self._spare(path / name)
            self._remove(path)

    def _spare(self, path: Path) -> None:
        with suppress(FileNotFoundError):
            os.replace(path, self.directory / f"{SPARE}{path.name}")

    @patient
    def discard_pending(self, *, after: int = 0) -> None:
        """A refusal, or a round that is over: what is pending of rounds after `after` is void."""
        for path in self._named("pending"):
            if _round_of(path) > after:
                self._remove(path)

    @patient
    def forget(self) -> None:
        """Drops all training state, not the identity: it belongs to another history."""
        self.discard_pending()
        for path in self._named("checkpoint"):
            self._remove(path)

    def _named(self, *kinds: str) -> list[Path]:
        """The directories of rounds of these kinds; other names are not this program's."""
        own = re.compile(rf"({'|'.join(kinds)})-[0-9]+")
        return [path for path in self.directory.iterdir() if own.fullmatch(path.name)]

    def _remove(self, path: Path) -> None:
        """Takes the name away first: a kill in the middle leaves no half directory under it."""
        trash = self.directory / f"trash-{path.name}"
        if trash.exists():
            shutil.rmtree(trash)  # no name is taken while an earlier one cannot go
        os.replace(path, trash)
        shutil.rmtree(trash, ignore_errors=True)

    def _read(self, kind: str, round_number: int) -> Saved:
        path = self.directory / f"{kind}-{round_number}"
        try:
            tensors = load_file(str(path / STATE_FILE))
        except (OSError, SafetensorError, RuntimeError) as exc:  # the last: torch's, of its map
            patience.check(exc, path)
            raise StoreError(
                f"cannot read {str(path / 'state.safetensors')!r}: {exc}; remove {str(path)!r} "
                f"and the island starts from the run's weights"
            ) from exc
        return Saved(round_number, _read_json(path / "complete.json"), tensors, path)

    @patient
    def rounds(self) -> tuple[int | None, tuple[int, ...]]:
        """Which rounds the checkpoint and what is pending are of, the latter oldest first."""
        return max(self._complete("checkpoint"), default=None), tuple(self._complete("pending"))

    def _complete(self, kind: str) -> list[int]:
        found = self._named(kind)
        return sorted(_round_of(path) for path in found if (path / "complete.json").exists())

    @patient
    def read_raw(self, saved: Saved, name: str, buffer: memoryview) -> None:
        """Fills `buffer` from a file of the saved directory; StoreError when it does not fit."""
        assert saved.path is not None, "only what was read from disk has files"
        path = saved.path / name
        try:
            with path.open("rb") as file:
                found = file.readinto(buffer)
                longer = file.read(1)
        except OSError as exc:
            patience.check(exc, path)
            raise StoreError(f"cannot read {str(path)!r}: {exc.strerror}") from exc
        if found != len(buffer) or longer:
            raise StoreError(
                f"{str(path)!r} does not have {len(buffer)} bytes; remove {str(saved.path)!r} and "
                f"the island starts from the run's weights"
            )

    def _remove_unfinished(self) -> None:
        for path in self._named("trash-checkpoint", "trash-pending"):
            shutil.rmtree(path, ignore_errors=True)
        pending = FRAME_FILE if self._has_frames else STATE_FILE
        for kind, needed in (("pending", pending), ("checkpoint", STATE_FILE)):
            for path in self._named(kind):
                if not (path / "complete.json").exists() or not (path / needed).exists():
                    self._remove(path)


def _round_of(path: Path) -> int:
    """The round of a directory, by its name."""
    return int(path.name.rpartition("-")[2])


def _read_json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            value = json.loads(file.read(MAX_JSON_BYTES))
    except (OSError, ValueError) as exc:
        if isinstance(exc, OSError):
            patience.check(exc, path)
        raise StoreError(f"cannot read {str(path)!r}: {exc}; remove its directory") from exc
    if not isinstance(value, dict):
        raise StoreError(f"{str(path)!r} holds no object; remove its directory")
    return value


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    # Only for its owner: it may hold the island key.
    filesystem.write_whole(path, json.dumps(value).encode(), way_out=_WAY_OUT)


@contextmanager
def _own_disk(path: Path) -> Iterator[None]:
    """Names what this island's disk refuses; the island ends with it.

    A coordinator's disk is waited for: the message is sent again until it works. This one is
    somebody else's to repair, so no message is repeated because of it.
    """
    try:
        with filesystem.naming("write", path, way_out=_WAY_OUT):
            yield
    except StoreError as exc:
        exc.retry = False
        raise
    except SafetensorError as exc:
        patience.check(exc, path)
        raise StoreError(f"cannot write {str(path)!r}: {exc}; {_WAY_OUT}") from exc
