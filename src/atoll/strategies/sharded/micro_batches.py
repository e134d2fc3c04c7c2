"""Which rows of a step a rank computes: fixed by the step's rows, the rank and the ranks there are.

A step has `batch` rows whatever the number of ranks, so that number changes no learning rate.
"""

from dataclasses import dataclass

from atoll.collectives import schedule
from atoll.layout import Span

STAND_IN = Span(0, 1)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of a step that a rank computes at once."""

    rows: Span  # of the step's rows
    counts: bool  # False: a stand-in, because the rank has none, and all ranks compute together

    @property
    def num_rows(self) -> int:
        """Rows that count."""
        return len(self.rows) if self.counts else 0


def of(batch: int, *, rank: int, size: int, count: int) -> list[MicroBatch]:
    """The `count` micro-batches of `rank` of `size`: of the rows `[r*B//N, (r+1)*B//N)`."""
    own = schedule.cut(batch, size)[rank]
    return [
        MicroBatch(Span(own.start + part.start, own.start + part.stop), counts=True)
        if len(part)
        else MicroBatch(STAND_IN, counts=False)
        for part in schedule.cut(len(own), count)
    ]
