"""What of a worker survives its death: its key, and what its island has saved, in memory."""

import copy
import io
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from atoll.island.state.base import FRAME_FILE, Saved
from atoll.simulate.faults.invariants.islands import Memory
from atoll.simulate.faults.standin import Frame

_PENDING, _CHECKPOINT = "pending", "checkpoint"


@dataclass
class Folder:
    """A directory of the island's state; it counts once it has its meta data."""

    files: dict[str, bytes] = field(default_factory=dict)
    meta: dict[str, Any] | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)


class MemoryStore:
    """Fulfils `state.base.Store`, as `IslandStore` does on a disk."""

    def __init__(self) -> None:
        self._folders: dict[Path, Folder] = {}

    def begin(self, round_number: int) -> Path:
        path = _path(_PENDING, round_number)
        self._folders[path] = Folder()
        return path

    @contextmanager
    def writing(self, path: Path) -> Iterator[BinaryIO]:
        file = io.BytesIO()
        yield file
        self._folders[path.parent].files[path.name] = file.getvalue()

    def complete(self, path: Path, meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        folder = self._folders[path]
        folder.tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        folder.meta = json.loads(json.dumps(dict(meta)))

    def pending(self, round_number: int) -> Saved:
        return self._saved(_PENDING, round_number)

    def checkpoint(self) -> Saved | None:
        newest, _ = self.rounds()
        return None if newest is None else self._saved(_CHECKPOINT, newest)

    def rounds(self) -> tuple[int | None, tuple[int, ...]]:
        return max(self._complete(_CHECKPOINT), default=None), tuple(self._complete(_PENDING))

    def frame(self, saved: Saved) -> Frame:
        path = _path(_PENDING, saved.round)
        preamble = bytes.fromhex(saved.meta["preamble"])
        return Frame(preamble + self._folders[path].files[FRAME_FILE], saved.meta["sha256"])

    def read_raw(self, saved: Saved, name: str, buffer: memoryview) -> None:
        assert saved.path is not None
        buffer[:] = self._folders[saved.path].files[name]

    def promote(self, round_number: int) -> None:
        promoted = self._folders.pop(_path(_PENDING, round_number))
        self._drop(_CHECKPOINT)
        self._folders[_path(_CHECKPOINT, round_number)] = promoted

    def discard_pending(self, *, after: int = 0) -> None:
        self._drop(_PENDING, after=after)

    def forget(self) -> None:
        self._folders.clear()

    def _drop(self, kind: str, *, after: int = 0) -> None:
        for path in [p for p in self._folders if p.parts[0] == kind and int(p.name) > after]:
            del self._folders[path]

    def _complete(self, kind: str) -> list[int]:
        found = [p for p, folder in self._folders.items() if folder.meta is not None]
        return sorted(int(path.name) for path in found if path.parts[0] == kind)

    def _saved(self, kind: str, round_number: int) -> Saved:
        path = _path(kind, round_number)
        folder = self._folders[path]
        assert folder.meta is not None, path
        return Saved(round_number, folder.meta, folder.tensors, path)


def _path(kind: str, round_number: int) -> Path:
    return Path(kind) / str(round_number)


@dataclass
class Disk:
    """A worker's disk, and beside it what the checks remember of the island that it belongs to."""

    key: str
    signing: bytes  # the seed of the key that signs what it publishes
    store: MemoryStore = field(default_factory=MemoryStore)
    memory: Memory = field(default_factory=Memory)

    def copy(self) -> "Disk":
        """The same contents on another machine."""
        return copy.deepcopy(self)
