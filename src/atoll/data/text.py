"""Byte-level text from files: every byte is a token, files follow one another.

Owns reading bytes across file borders. Reads rows when asked for; a whole file is never in memory.
"""

import glob
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

from atoll.data import base
from atoll.data.base import Row, WindowedRows
from atoll.errors import ConfigError, StoreError

BYTE_VALUES = 256
_STAY = "data files must not change during a run; restore it and start the island again"


def find_files(location: str) -> list[Path]:
    """The files that `location` names: itself, or what it matches as a glob, sorted by path."""
    if Path(location).is_file():
        return [Path(location)]
    paths = sorted(Path(name) for name in glob.glob(location, recursive=True))
    files = [path for path in paths if path.is_file()]
    if not files:
        raise ConfigError(
            f"data location {location!r} names no file; give one, or a pattern like 'corpus/*.txt'"
        )
    return files


class TextFiles(WindowedRows):
    """The bytes of files, in the given order, as one sequence of tokens.

    Plain reads, no memory map: a file that shrinks during the run is a StoreError, not a SIGBUS,
    and any number of files needs one handle.
    """

    def __init__(self, paths: Sequence[Path], *, block: int, held_out_rows: int) -> None:
        sha256, sizes = base.hash_files(paths)
        self._paths = tuple(paths)
        self._ends = list(accumulate(sizes))
        super().__init__(
            {"kind": "text", "sha256": sha256},
            tokens=sum(sizes),
            block=block,
            held_out_rows=held_out_rows,
            vocab=BYTE_VALUES,
            subject=f"text of {len(paths)} file(s) from {str(paths[0]) if paths else None!r}",
        )

    def _read(self, start: int) -> Row:
        data = bytearray()
        stop = start + self.block + 1
        while (position := start + len(data)) < stop:
            file = bisect_right(self._ends, position)
            file_start = self._ends[file - 1] if file else 0
            wanted = min(stop, self._ends[file]) - position
            data += self._read_file(self._paths[file], position - file_start, wanted)
        return np.frombuffer(bytes(data), dtype=np.uint8).astype(np.int64)

    @staticmethod
    def _read_file(path: Path, offset: int, count: int) -> bytes:
        try:
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read(count)
        except OSError as exc:
            raise StoreError(
                f"data file {str(path)!r} can no longer be read ({exc}); {_STAY}"
            ) from exc
        if len(data) < count:
            raise StoreError(
                f"data file {str(path)!r} ends at byte {offset + len(data)} and had at least "
                f"{offset + count} when it was opened; {_STAY}"
            )
        return data
