"""One rank's part of a batch: its rows, and what its gradient counts for."""

from torch import Tensor


class BatchSlice:
    """Which rows of the batch under way are this rank's: n_r of N."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self.rows = 0
        self.total = 0

    def slice(self, batch: Tensor) -> Tensor:
        """This rank's rows of `batch`; a rank without any gets a stand-in that counts as none."""
        self.total = len(batch)
        start = self.total * self._rank // self._size
        stop = self.total * (self._rank + 1) // self._size
        self.rows = stop - start
        return batch[start:stop] if self.rows else batch[:1]

    def clear(self) -> None:
        """No batch is under way."""
        self.rows = self.total = 0

    def scale(self, gradient: Tensor) -> None:
        """Makes a mean over this rank's rows a part of the mean over all, in place."""
        if self.rows == 0:
            gradient.zero_()  # not times zero: the stand-in row may have overflowed
        elif self.rows != self.total:
            gradient.mul_(self.rows / self.total)
