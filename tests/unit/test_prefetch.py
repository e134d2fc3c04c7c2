"""Rows are read before they are needed, each once, and what goes wrong comes out in its place."""

import threading

import pytest
import torch

from atoll.data import batches
from atoll.data.synthetic import SyntheticCorpus
from atoll.errors import StoreError
from atoll.island.prefetch import DEPTH, RowPrefetch
from atoll.rows import RowRange

CORPUS = SyntheticCorpus(seed=1, rows=100, held_out_rows=1, block=4)


def rows(start: int, stop: int) -> RowRange:
    return RowRange("d" * 16, start, stop)


class Watched:
    """A corpus that tells which rows were read, and from which thread."""

    def __init__(self, *, broken_after: int = 1000) -> None:
        self.threads: set[str] = set()
        self.read = 0
        self._broken_after = broken_after
        self._changed = threading.Condition()

    def __getattr__(self, name):
        return getattr(CORPUS, name)

    def row(self, index):
        if self.read >= self._broken_after:
            raise StoreError("the disk is gone")
        with self._changed:
            self.threads.add(threading.current_thread().name)
            self.read += 1
            self._changed.notify_all()
        return CORPUS.row(index)

    def wait_for(self, rows: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.read >= rows, timeout=60)


@pytest.fixture
def watched():
    return Watched()


@pytest.fixture
def ahead(watched):
    made = RowPrefetch(watched)
    yield made
    made.close()


def expected(*ranges: RowRange) -> list[torch.Tensor]:
    return list(batches.batches(CORPUS, ranges, batch=2, seed=1))


def same(one, other) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def test_batches_are_those_of_the_ranges_in_order(ahead):
    ranges = [rows(0, 5), rows(90, 96)]

    assert same(list(ahead.batches(ranges, batch=2, seed=1)), expected(*ranges))


def test_next_batches_are_read_while_one_is_used(ahead, watched):
    source = ahead.batches([rows(0, 40)], batch=2, seed=1)

    next(source)

    watched.wait_for(2 * (1 + DEPTH))
    assert watched.threads == {"rows-ahead_0"}


def test_rows_of_the_next_round_are_read_before_it_begins(ahead, watched):
    ahead.begin([rows(10, 20)], batch=2, seed=1)
    watched.wait_for(2 * DEPTH)
    before = watched.read

    made = list(ahead.batches([rows(10, 20)], batch=2, seed=1))

    assert same(made, expected(rows(10, 20)))
    assert (before, watched.read) == (2 * DEPTH, 10)


def test_rows_that_were_read_in_vain_are_dropped(ahead):
    """The plan was another one in the end."""
    ahead.begin([rows(50, 60)], batch=2, seed=1)

    made = list(ahead.batches([rows(0, 6)], batch=2, seed=1))

    assert same(made, expected(rows(0, 6)))


def test_rows_begun_twice_are_read_once(ahead, watched):
    ahead.begin([rows(0, 4)], batch=2, seed=1)
    ahead.begin([rows(0, 4)], batch=2, seed=1)

    list(ahead.batches([rows(0, 4)], batch=2, seed=1))

    assert watched.read == 4


def test_row_that_cannot_be_read_is_an_error_where_it_is_needed():
    broken = Watched(broken_after=2)
    ahead = RowPrefetch(broken)
    source = ahead.batches([rows(0, 10)], batch=2, seed=1)

    assert same([next(source)], expected(rows(0, 2)))
    with pytest.raises(StoreError, match="the disk is gone"):
        next(source)

    ahead.close()
