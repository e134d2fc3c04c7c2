"""A memory-mapped file of raw token numbers, little-endian, without a header.

Owns the mapping and the check of token values. Tokenizes nothing.
"""

from pathlib import Path

import numpy as np

from atoll.data import base
from atoll.data.base import Row, WindowedRows
from atoll.errors import ConfigError

DTYPES: dict[str, np.dtype[np.unsignedinteger]] = {
    "uint16": np.dtype("<u2"),
    "uint32": np.dtype("<u4"),
}


class TokenFile(WindowedRows):
    """Tokens of one file, read through a memory map.

    Values are checked against `vocab` row by row as they are read: a whole pass at start would
    cost as much as an epoch of reading.
    """

    def __init__(
        self, path: Path, *, dtype: str, vocab: int, block: int, held_out_rows: int
    ) -> None:
        if dtype not in DTYPES:
            raise ConfigError(f"data.dtype={dtype!r} is not known; use one of {sorted(DTYPES)}")
        if vocab < 1:
            raise ConfigError(f"data.vocab={vocab!r} must be at least 1")
        sha256, [nbytes] = base.hash_files([path])
        itemsize = DTYPES[dtype].itemsize
        if nbytes % itemsize:
            raise ConfigError(
                f"token file {str(path)!r} has {nbytes} bytes, not a multiple of {itemsize} as "
                f"dtype={dtype!r} needs; check the dtype or write the file again"
            )
        self._path = path
        super().__init__(
            {"kind": "tokens", "sha256": sha256, "dtype": dtype},
            tokens=nbytes // itemsize,
            block=block,
            held_out_rows=held_out_rows,
            vocab=vocab,
            subject=f"token file {str(path)!r}",
        )
        self._tokens = np.memmap(path, dtype=DTYPES[dtype], mode="r")  # [tokens]

    def _read(self, start: int) -> Row:
        row: Row = self._tokens[start : start + self.block + 1].astype(np.int64)
        if int(row.max()) >= self.vocab:
            offset = int(np.argmax(row >= self.vocab))
            raise ConfigError(
                f"token {start + offset} of {str(self._path)!r} is {int(row[offset])}; tokens must "
                f"be below vocab={self.vocab}; raise data.vocab or check data.dtype"
            )
        return row
