"""A machine's weights between the windows of a gather, on disk: whole, or those before.

    state/gather.json              manifest, next window, weights' digest, the last record's sha256
    state/gather.lock              whoever moves the weights holds it
    state/weights/<window>.f32     the weights before that window, little-endian fp32

The ranks of a machine share it; each reads and writes the elements that it owns.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from atoll import canonical, files
from atoll.errors import ConfigError, StateDamaged
from atoll.gather.artifact import FIRST
from atoll.gather.replica import Replica
from atoll.layout import ELEMENT_BYTES, Layout, Span, byte_view
from atoll.ledger.sqlite.lock import Lock, hold
from atoll.sums import digest
from atoll.versions import weights_file
from atoll.wire import schema

_MAX_BYTES = 4096
_OF = "gather state"


@dataclass(frozen=True)
class GatherState:
    """The state directory of one machine."""

    directory: Path
    layout: Layout
    manifest_sha256: str

    def hold(self) -> Lock:
        """Keeps others from moving the same weights, once they are there; else StateHeld."""
        return hold(self.directory, file_name="gather.lock", who="gather window or catch-up")

    def begin(self, start: Path) -> None:
        """Makes the state before window 0, unless there is one."""
        if self._head.exists():
            return
        flat = weights_file.read(start, self.layout)
        files.make_directories(self.directory / "weights")
        files.write_whole(self.weights(0), bytes(byte_view(flat)))
        self._write_head(0, digest.digest(self.layout, flat).root, FIRST)

    def replica(self, own: Span) -> Replica:
        """The weights of `own` as they were left; StateDamaged where the files do not fit."""
        with files.naming("read", self._head), self._head.open("rb") as file:
            table: dict[str, Any] = schema.object_of(file.read(_MAX_BYTES), of=_OF)
        schema.keys(table, known=("digest", "manifest_sha256", "prev", "window"), of=_OF)
        for name, rule in (
            ("digest", schema.SHA256),
            ("manifest_sha256", schema.SHA256),
            ("prev", schema.SHA256),
            ("window", schema.WHOLE),
        ):
            rule.check(name, table[name], of=_OF)
        if table["manifest_sha256"] != self.manifest_sha256:
            raise ConfigError(
                f"state={str(self.directory)!r} is of a run with the manifest "
                f"{table['manifest_sha256']}, the gather file gives {self.manifest_sha256}; put "
                f"run_id, start and outer_lr back, or name another directory for another run"
            )
        path = self.weights(table["window"])
        master = own.room()
        fd = files.SYSTEM.open(path)
        try:
            if files.SYSTEM.identity(fd).nbytes != self.layout.nbytes:
                raise StateDamaged(f"{str(path)!r} has not {self.layout.nbytes} bytes; restore it")
            if len(own):
                files.read_into(fd, own.start * ELEMENT_BYTES, byte_view(master), path=path)
        finally:
            files.SYSTEM.close(fd)
        return Replica(
            master=master, window=table["window"], digest=table["digest"], prev=table["prev"]
        )

    def reserve(self, window: int) -> None:
        """One rank makes room for the weights before `window`; then each writes its own."""
        part = files.part_of(self.weights(window))
        with files.naming("write", part), part.open("wb") as file:
            files.SYSTEM.reserve(file.fileno(), self.layout.nbytes)

    def write(self, window: int, own: Span, master: Tensor) -> None:
        """A rank's elements, durably."""
        part = files.part_of(self.weights(window))
        with files.naming("write", part), part.open("r+b") as file:
            view, offset = byte_view(master) if len(own) else b"", own.start * ELEMENT_BYTES
            while view:
                count = os.pwrite(file.fileno(), view, offset)
                view, offset = view[count:], offset + count
        files.sync(part)

    def finish(self, replica: Replica) -> None:
        """One rank, once all have written: from here on these are the machine's weights."""
        path = self.weights(replica.window)
        with files.naming("rename to", path):
            files.SYSTEM.rename(files.part_of(path), path)  # whose bytes each rank has synced
        files.sync(path.parent)
        self._write_head(replica.window, replica.digest, replica.prev)
        for old in (self.directory / "weights").glob(f"{'[0-9]' * 8}.f32"):
            if old != path:
                old.unlink(missing_ok=True)

    def weights(self, window: int) -> Path:
        """The file of the weights before `window`."""
        return self.directory / "weights" / f"{window:08d}.f32"

    def whole(self) -> Replica:
        """All weights, with one rank; StateDamaged where they do not have their digest."""
        found = self.replica(Span(0, self.layout.size))
        if digest.digest(self.layout, found.master).root != found.digest:
            raise damaged(self.weights(found.window), found.digest)
        return found

    def _write_head(self, window: int, root: str, prev: str) -> None:
        table = {
            "digest": root,
            "manifest_sha256": self.manifest_sha256,
            "prev": prev,
            "window": window,
        }
        files.write_whole(self._head, canonical.dumps(table).encode())

    @property
    def _head(self) -> Path:
        return self.directory / "gather.json"


def damaged(path: Path, digest: str) -> StateDamaged:
    """The error for weights that are not those that were saved."""
    return StateDamaged(
        f"{str(path)!r} does not have the digest {digest}; move the state directory away and "
        f"catch up"
    )
