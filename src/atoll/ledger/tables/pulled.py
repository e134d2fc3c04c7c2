"""What a run pulls from buckets: who publishes where, what was stated, and what it did without."""

from sqlalchemy import bindparam, func, select

from atoll.errors import Conflict
from atoll.ledger.records import AnnouncementRecord, PublisherRecord, SkipRecord
from atoll.ledger.tables import schema
from atoll.ledger.tables.table import RecordTable

_ANNOUNCEMENTS, _SKIPS = schema.announcements, schema.skips
_ANNOUNCED = (
    select(_ANNOUNCEMENTS)
    .where(_ANNOUNCEMENTS.c.round == bindparam("in_round"))
    .order_by(_ANNOUNCEMENTS.c.worker_id)
)
_SKIPPED = (
    select(_SKIPS)
    .where(_SKIPS.c.round == bindparam("in_round"))
    .order_by(_SKIPS.c.worker_id, _SKIPS.c.number)
)
_REASONS = select(_SKIPS.c.reason, func.count()).group_by(_SKIPS.c.reason).order_by(_SKIPS.c.reason)


class PublisherTable(RecordTable):
    """The keys and buckets of workers."""

    def all(self) -> list[PublisherRecord]:
        """In worker_id order."""
        return self._all(PublisherRecord)

    def get(self, worker_id: str) -> PublisherRecord | None:
        """That of one worker."""
        return self._find(PublisherRecord, worker_id)

    def add(self, publisher: PublisherRecord) -> None:
        """The same again changes nothing; Conflict for another key or bucket of that worker."""
        known = self.get(publisher.worker_id)
        if known is None:
            self._add(publisher)
        elif known != publisher:
            raise Conflict(
                f"worker_id={publisher.worker_id!r} publishes into {known.bucket!r} and signs with "
                f"the key {known.public_key}; it cannot take {publisher.bucket!r} and "
                f"{publisher.public_key}"
            )


class AnnouncementTable(RecordTable):
    """What workers stated of contributions that were pulled."""

    def get(self, round_number: int, worker_id: str) -> AnnouncementRecord | None:
        """What stands under this key."""
        return self._find(AnnouncementRecord, round_number, worker_id)

    def of_round(self, round_number: int) -> list[AnnouncementRecord]:
        """In worker_id order."""
        return self._records(AnnouncementRecord, _ANNOUNCED, {"in_round": round_number})

    def add(self, announcement: AnnouncementRecord) -> None:
        """In the transaction that accepts the contribution."""
        self._add(announcement)


class SkipTable(RecordTable):
    """Contributions that rounds did without."""

    def of_round(self, round_number: int) -> list[SkipRecord]:
        """By worker_id, and of each in the order in which they came."""
        return self._records(SkipRecord, _SKIPPED, {"in_round": round_number})

    def by_reason(self) -> dict[str, int]:
        """How many there are in all rounds together."""
        return {reason: int(count) for reason, count in self._connection.rows(_REASONS)}

    def add(
        self, round_number: int, worker_id: str, *, reason: str, sentence: str, wall: float
    ) -> SkipRecord:
        """Records one more of this worker in this round."""
        before = sum(skip.worker_id == worker_id for skip in self.of_round(round_number))
        skip = SkipRecord(round_number, worker_id, before + 1, reason, sentence, wall)
        self._add(skip)
        return skip
