"""What the continuity of an island needs of the place that it is kept in."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from torch import Tensor

from atoll.island.link.base import FrameSource

FRAME_FILE, RESIDUAL_FILE, STATE_FILE = "frame", "residual", "state.safetensors"


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint or pending directory."""

    round: int
    meta: dict[str, Any]
    tensors: dict[str, Tensor]
    path: Path | None = None


class Frame(FrameSource, Protocol):
    """A frame that is open to be sent."""

    def close(self) -> None: ...


class Store(Protocol):
    """Where an island's inner state is kept. `IslandStore` is the one on disk."""

    def begin(self, round_number: int) -> Path: ...

    def writing(self, path: Path) -> AbstractContextManager[BinaryIO]: ...

    def complete(
        self, path: Path, meta: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> None: ...

    def pending(self, round_number: int) -> Saved: ...

    def checkpoint(self) -> Saved | None: ...

    def rounds(self) -> tuple[int | None, tuple[int, ...]]: ...

    def frame(self, saved: Saved) -> Frame: ...

    def read_raw(self, saved: Saved, name: str, buffer: memoryview) -> None: ...

    def promote(self, round_number: int) -> None: ...

    def discard_pending(self, *, after: int = 0) -> None: ...

    def forget(self) -> None: ...
