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

    round: int
    files: dict[str, bytes] = field(default_factory=dict)
    meta: dict[str, Any] | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)


class MemoryStore:
    """Fulfils `state.base.Store`, as `IslandStore` does on a disk: at most one folder of a kind."""

    def __init__(self) -> None:
        self._folders: dict[str, Folder] = {}

    def begin(self, round_number: int) -> Path:
        self._folders[_PENDING] = Folder(round_number)
        return Path(_PENDING)

    @contextmanager
    def writing(self, path: Path) -> Iterator[BinaryIO]:
        file = io.BytesIO()
        yield file
        self._folders[_PENDING].files[path.name] = file.getvalue()

    def complete(self, path: Path, meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        folder = self._folders[path.name]
        folder.tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        folder.meta = json.loads(json.dumps(dict(meta)))

    def pending(self) -> Saved | None:
        return self._saved(_PENDING)

    def checkpoint(self) -> Saved | None:
        return self._saved(_CHECKPOINT)

    def rounds(self) -> tuple[int | None, int | None]:
        kept, pending = self.checkpoint(), self.pending()
        return None if kept is None else kept.round, None if pending is None else pending.round

    def frame(self, saved: Saved) -> Frame:
        return Frame(self._folders[_PENDING].files[FRAME_FILE], saved.meta["sha256"])

    def read_raw(self, saved: Saved, name: str, buffer: memoryview) -> None:
        assert saved.path is not None
        buffer[:] = self._folders[saved.path.name].files[name]

    def promote(self, round_number: int) -> None:
        assert self._folders[_PENDING].round == round_number
        self._folders[_CHECKPOINT] = self._folders.pop(_PENDING)

    def discard_pending(self) -> None:
        self._folders.pop(_PENDING, None)

    def forget(self) -> None:
        self._folders.clear()

    def _saved(self, kind: str) -> Saved | None:
        folder = self._folders.get(kind)
        if folder is None or folder.meta is None:
            return None
        return Saved(folder.round, folder.meta, folder.tensors, Path(kind))


@dataclass
class Disk:
    """A worker's disk, and beside it what the checks remember of the island that it belongs to."""

    key: str
    store: MemoryStore = field(default_factory=MemoryStore)
    memory: Memory = field(default_factory=Memory)

    def copy(self) -> "Disk":
        """The same contents on another machine."""
        return copy.deepcopy(self)
