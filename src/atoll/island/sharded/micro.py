"""Which rows of a step are a rank's, and how it cuts them into micro-batches."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from atoll.island.ranks.batch_slice import BatchSlice


@dataclass(frozen=True)
class Micro:
    """One micro-batch of a rank."""

    index: int
    rows: Tensor  # [rows, block + 1]; at least one
    counted: int  # of them; 0: a stand-in that counts for nothing


def micro_batches(batch: Tensor, *, rank: int, size: int, count: int) -> Iterator[Micro]:
    """This rank's rows [rB//N, (r+1)B//N) of a step's `batch`, cut once more in the same way.

    A rank without rows computes on a stand-in: the others wait for its part in every exchange.
    """
    share = BatchSlice(rank, size)
    mine = share.slice(batch)
    counted = share.rows
    for index in range(count):
        start, stop = index * counted // count, (index + 1) * counted // count
        rows = mine[start:stop] if stop > start else batch[:1]
        yield Micro(index, rows, stop - start)
