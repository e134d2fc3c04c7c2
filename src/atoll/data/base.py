"""The dataset seam: numbered rows of tokens, and an identity by which two machines compare theirs.

Owns how a token sequence is cut into training and held-out rows. Knows no order of training (that
is `shuffle`) and no path: an identity names content, never a place.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from atoll import canonical
from atoll.errors import ConfigError

Row = NDArray[np.int64]
Identity = dict[str, object]


class Dataset(Protocol):
    """Rows of `block + 1` tokens: `block` inputs and, shifted by one, `block` targets.

    Implementations never change after they are opened and may be read by several threads.
    """

    @property
    def rows(self) -> int:
        """Training rows; 0: a stream, which has no last one."""
        ...

    @property
    def held_out_rows(self) -> int:
        """Rows at the end of the data that no training row shares a target with."""
        ...

    @property
    def block(self) -> int: ...

    @property
    def vocab(self) -> int:
        """Every token is below this."""
        ...

    def identity(self) -> Identity:
        """What defines the data, as JSON scalars; equal exactly when every row is."""
        ...

    def row(self, index: int) -> Row:
        """Training row `index`, int64 [block + 1], the caller's own copy; IndexError beyond."""
        ...

    def held_out(self, index: int) -> Row:
        """Held-out row `index`, int64 [block + 1], the caller's own copy; IndexError beyond."""
        ...


def check_cut(*, block: int, held_out_rows: int) -> None:
    """Raises ConfigError unless rows of `block` with `held_out_rows` at the end make sense."""
    if block < 1:
        raise ConfigError(f"data.block={block!r} must be at least 1 token")
    if held_out_rows < 0:
        raise ConfigError(f"data.held_out_rows={held_out_rows!r} must not be negative")


def check_index(index: int, rows: int, *, what: str) -> int:
    """`index` if it names one of `rows` rows; a negative one never counts from the end."""
    if not 0 <= index < rows:
        raise IndexError(f"{what} {index} is outside 0 to {rows - 1}")
    return index


def hash_files(paths: Iterable[Path]) -> tuple[str, list[int]]:
    """The sha256 (hex) of the files' bytes one after another, and each file's size.

    Reads in pieces, so memory does not grow with the files. A path that is no file: ConfigError.
    """
    digest = hashlib.sha256()
    sizes: list[int] = []
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"data file {str(path)!r} does not exist; name an existing file")
        with path.open("rb", buffering=0) as file:
            hashlib.file_digest(file, lambda: digest)  # goes on with the same one
            sizes.append(file.tell())
    return digest.hexdigest(), sizes


def shape(dataset: Dataset) -> Identity:
    """What the identities of all kinds say."""
    return {name: getattr(dataset, name) for name in ("rows", "held_out_rows", "block", "vocab")}


class WindowedRows(ABC):
    """What datasets that are cut from one sequence of tokens share.

    Windows of `block + 1` tokens at stride `block`, the last of them held out. Neighbours share one
    token, the last target of one and the first input of the next, so every token but the first is a
    target exactly once.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        tokens: int,
        block: int,
        held_out_rows: int,
        vocab: int,
        subject: str,
    ) -> None:
        """`identity` is what tells the tokens from others; `subject` names them in a refusal."""
        check_cut(block=block, held_out_rows=held_out_rows)
        self.rows = (tokens - 1) // block - held_out_rows
        if self.rows < 1:
            raise ConfigError(
                f"{subject} holds {tokens} tokens; one training row and "
                f"held_out_rows={held_out_rows} of block={block} need "
                f"{(held_out_rows + 1) * block + 1}; give more data or a smaller block"
            )
        self.held_out_rows = held_out_rows
        self.block = block
        self.vocab = vocab
        self._identity = identity

    def identity(self) -> Identity:
        return {**self._identity, **shape(self)}

    def row(self, index: int) -> Row:
        return self._read(check_index(index, self.rows, what="row") * self.block)

    def held_out(self, index: int) -> Row:
        checked = check_index(index, self.held_out_rows, what="held-out row")
        return self._read((self.rows + checked) * self.block)

    @abstractmethod
    def _read(self, start: int) -> Row:
        """The `block + 1` tokens from position `start`."""


def dataset_id(identity: Mapping[str, object]) -> str:
    """The short name of an identity: 16 hex digits of the sha256 of its canonical JSON.

    The number of rows is left out and compared apart: the same data with another length is then
    refused with both lengths named, instead of being taken for other data.
    """
    return canonical.sha256({k: v for k, v in identity.items() if k != "rows"})[:16]


def first_difference(
    mine: Mapping[str, object], theirs: Mapping[str, object]
) -> tuple[str, object, object] | None:
    """The first field (kind, then by name) in which two identities differ, with both values.

    None when they are the same data. A field that one side lacks differs, with None for it.
    """
    for field in sorted(mine.keys() | theirs.keys(), key=lambda name: (name != "kind", name)):
        if field not in mine or field not in theirs or mine[field] != theirs[field]:
            return field, mine.get(field), theirs.get(field)
    return None


def unigram_entropy(dataset: Dataset, *, rows: int = 1024) -> float:
    """Nats per token of the targets' own frequencies: the loss of a model that ignores its input.

    Measured on `rows` training rows spread evenly over the data (all of them when it has fewer).
    """
    total_rows = dataset.rows or rows  # of a stream the first ones
    sample = min(rows, total_rows)
    counts = np.zeros(dataset.vocab, dtype=np.int64)
    for step in range(sample):
        counts += np.bincount(dataset.row(step * total_rows // sample)[1:], minlength=dataset.vocab)
    total = int(counts.sum())
    return -math.fsum(c / total * math.log(c / total) for c in counts.tolist() if c)
