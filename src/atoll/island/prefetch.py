"""Rows read before they are needed: the next batches while one is trained, the next round's rows
while the round before it is computed. So training never waits for a row that could be there.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from atoll.data import batches
from atoll.data.base import Dataset
from atoll.rows import RowRange

DEPTH = 2  # batches in memory beside the one that is trained

Key = tuple[tuple[RowRange, ...], int, int, int]  # ranges, batch, seed, skip


class RowPrefetch:
    """Reads batches in a thread of its own; for one thread that trains."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._key: Key | None = None
        self._source: Iterator[Tensor] = iter(())
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="rows-ahead")
        self._read: deque[Future[Tensor | None]] = deque()

    def begin(self, ranges: Sequence[RowRange], *, batch: int, seed: int, skip: int = 0) -> None:
        """Reads the first batches of `ranges`, unless they are being read already."""
        key = (tuple(ranges), batch, seed, skip)
        if key == self._key:
            return
        self._drop()
        self._key = key
        self._source = batches.batches(self._dataset, ranges, batch=batch, seed=seed, skip=skip)
        for _ in range(DEPTH):
            self._submit()

    def batches(
        self, ranges: Sequence[RowRange], *, batch: int, seed: int, skip: int = 0
    ) -> Iterator[Tensor]:
        """The batches of `ranges` after the first `skip`, each read while one before it is used."""
        self.begin(ranges, batch=batch, seed=seed, skip=skip)
        self._key = None  # what is handed out is not begun a second time
        while self._read:
            found = self._read.popleft().result()
            if found is None:
                break
            self._submit()
            yield found
        self._drop()

    def close(self) -> None:
        """Lets the thread go."""
        self._drop()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _submit(self) -> None:
        source = self._source
        self._read.append(self._pool.submit(lambda: next(source, None)))

    def _drop(self) -> None:
        for future in self._read:
            future.cancel()
        self._read.clear()
        self._key = None
