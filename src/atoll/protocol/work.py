"""What the coordinator tells about its queues; one reply has all that a picture of them needs."""

from typing import Annotated, Literal

from pydantic import Field

from atoll.protocol.exchange import Ask, Route
from atoll.protocol.fields import Message, OfQuery, Whole

MAX_QUEUES = 64  # newest epochs shown
QUEUES_IN_PAGE = 8  # of which each may name all workers

Bitmap = Annotated[str, Field(pattern=r"^([0-9a-f]{2})*$")]  # unit u is bit u % 8 of byte u // 8


class WorkerRows(Message):
    """Rows of one queue that one worker was ever given, by what became of them."""

    worker_id: str
    done: Whole
    leased: Whole
    reopened: Whole  # lost, and open or already given to somebody again
    given_up: Whole


class Queue(Message):
    """One epoch of one dataset."""

    dataset_id: str
    shuffle_seed: Annotated[int, Field(strict=True, ge=0, lt=2**63)]  # as in the manifest
    epoch: Whole
    length: Whole  # 0: a stream
    units: Whole
    unit_rows: Whole  # of a stream
    units_issued: Whole
    units_done: Whole
    issued: Bitmap
    done: Bitmap
    rows_done: Whole
    rows_leased: Whole
    rows_open: Whole  # reopened, and in no lease again
    rows_given_up: Whole
    workers: tuple[WorkerRows, ...]


class Dataset(Message):
    """A dataset whose rows are issued, or were under an earlier definition."""

    dataset_id: str
    name: str
    length: Whole  # 0: a stream
    weight: Whole
    current: bool  # False: of an earlier definition; its queues stay and are not used
    rows_issued: Whole  # for the first time
    epoch: Whole  # of the next row that is issued for the first time
    next_unit: Whole  # of the same row


class DamagedEntry(Message):
    """A damaged queue entry, which is not used; its rows are known from the leases instead."""

    name: str
    reason: str


class Work(Message):
    """The queues of a run."""

    policy: Literal["exactly_once", "at_most_once"]
    lease_seconds: float
    datasets: tuple[Dataset, ...]
    queues: tuple[Queue, ...]  # the newest epochs, by dataset and epoch
    left_off: Whole  # earlier queues that are not shown
    more_from: Whole = 0  # what to ask the next page with; 0: this is the last
    damaged: tuple[DamagedEntry, ...]
    expired_leases: Whole  # since the coordinator started


class WorkRequest(Ask[Work], route=Route("GET", "/work", large=True)):
    """How far are the queues, and who has which rows? `limit` queues from number `first` on."""

    first: Annotated[int, Field(strict=True, ge=0, le=MAX_QUEUES), OfQuery] = 0
    limit: Annotated[int, Field(strict=True, ge=1, le=QUEUES_IN_PAGE), OfQuery] = QUEUES_IN_PAGE

    def page(self, whole: Work) -> Work:
        """What is asked for of an answer about all queues."""
        end = self.first + self.limit
        kept, more_from = whole.queues[self.first : end], end if end < len(whole.queues) else 0
        return whole.model_copy(update={"queues": kept, "more_from": more_from})
