"""Row ranges -> batches of tokens, in the one order that the run's seed gives them.

Owns stacking rows into tensors. Holds one batch at a time; knows no device and no worker.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from atoll.data import mixture, shuffle
from atoll.data.base import Dataset, Row
from atoll.errors import ConfigError
from atoll.rows import RowRange

T = TypeVar("T")


def batches(
    dataset: Dataset, ranges: Sequence[RowRange], *, batch: int, seed: int, skip: int = 0
) -> Iterator[Tensor]:
    """The rows of `ranges` in order, as int64 tensors [batch, block + 1], but for the first `skip`.

    Rows of several datasets take turns (`mixture.turns`). Batches run across the borders of ranges
    and epochs. Where the rows do not divide evenly the last batch is smaller: no row is repeated or
    dropped to fill it.
    """
    _check_batch(batch)
    places = islice(mixture.turns(dataset, ranges), skip * batch, None)
    return (_stack(_rows(chunk, seed=seed)) for chunk in _chunks(places, batch))


def held_out_batches(dataset: Dataset, indices: Iterable[int], *, batch: int) -> Iterator[Tensor]:
    """The held-out rows `indices` in order, as int64 tensors [batch, block + 1].

    The last is smaller when the rows do not divide.
    """
    _check_batch(batch)
    return (_stack(dataset.held_out(i) for i in chunk) for chunk in _chunks(indices, batch))


def _check_batch(batch: int) -> None:
    if batch < 1:
        raise ConfigError(f"batch={batch!r} must be at least 1 row")


def _chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


def _rows(places: Sequence[tuple[Dataset, int]], *, seed: int) -> Iterator[Row]:
    """The rows at positions of datasets, in the given order."""
    found: dict[int, Iterator[Row]] = {}
    for dataset in {id(dataset): dataset for dataset, _ in places}.values():
        mine = [position for one, position in places if one is dataset]
        indices = shuffle.rows_at(np.array(mine, dtype=np.int64), rows=dataset.rows, seed=seed)
        found[id(dataset)] = map(dataset.row, indices.tolist())
    return (next(found[id(dataset)]) for dataset, _ in places)


def _stack(rows: Iterable[Row]) -> Tensor:
    return torch.from_numpy(np.stack(list(rows)))  # [rows, block + 1]
