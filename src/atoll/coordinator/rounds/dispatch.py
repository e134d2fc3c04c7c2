"""Which rows of which datasets are issued next: the plan of a round out of what the ledger says.

Owns the datasets of the run and the way from the pure plan to leases. The leases are the truth:
nothing about rows is kept in memory, so a restart has nothing to lose.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace

from atoll.data import parts
from atoll.data import plan as plans
from atoll.data.parts import Part
from atoll.data.plan import Source
from atoll.errors import StateDamaged
from atoll.ledger import units
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import (
    DatasetRecord,
    LeaseRecord,
    LeaseState,
    QueueRecord,
    RoundPlan,
)
from atoll.ledger.tables.transaction import Transaction
from atoll.protocol.manifest import Manifest
from atoll.rows import RowRange
from atoll.strategies import registry as strategies
from atoll.versions.manifests import Recorded

log = logging.getLogger(__name__)


def check(manifest: Manifest) -> None:
    """ConfigError for a manifest whose rounds cannot be dispatched."""
    found = [
        Source(part.dataset_id, part.length, part.weight, cursor=0)
        for part in parts.parts_of(manifest.data.identity)
    ]
    plans.check_epochs(found, rows_each=strategies.any_of(manifest).rows_each)


class Dispatch:
    """The run's datasets and what is issued of them; under the lock of `Rounds`."""

    def __init__(self, ledger: Ledger, manifest: Manifest) -> None:
        self._seed = manifest.seed
        self._block = int(manifest.data.identity["block"])
        with ledger.writing() as t:
            self.parts = add_datasets(t, manifest)
            found = t.queues.all()
        # How each is cut never changes; their bitmaps do, and stay in the ledger.
        self._queues = {q.name: replace(q, issued=b"", done=b"") for q in found.sound}
        self.refused = tuple(entry.name for entry in found.damaged)
        for entry in found.damaged:
            log.error(
                "a queue entry is refused; its rows are served from the leases",
                extra={"queue": entry.name, "reason": entry.reason},
            )

    def plan(
        self,
        t: Transaction,
        round_number: int,
        rows: Mapping[str, int],
        recorded: Recorded,
        *,
        cursor: int,
        tokens: int,
    ) -> RoundPlan:
        """The plan of a round that leases as many rows to each worker as `rows` says.

        What is issued already is read from `t`. `cursor` is what the rounds so far have recorded;
        `tokens` is what the round's learning rate starts from.
        """
        reopened = {lease.row_range: lease for lease in t.leases.reopened()}
        planned = plans.plan(rows, sources=self._sources(t, cursor), reopened=list(reopened))
        taken = [reopened[span] for span in planned.taken]
        manifest = recorded.manifest
        leases = [
            self._lease(round_number, worker, span, manifest, taken)
            for worker, spans in sorted(planned.ranges.items())
            for span in spans
        ]
        # What is left of a reopened lease that was needed only in part stays reopened.
        left = [
            replace(taken[-1], start=s.start, unit=self._queue(s, manifest).cut.unit(s.start))
            for s in planned.left
        ]
        return RoundPlan(
            round=round_number,
            manifest_sha256=recorded.sha256,
            cursor=sum(planned.cursors.values()),
            tokens=tokens,
            leases=tuple(leases),
            taken=tuple(taken),
            left=tuple(left),
            queues=tuple(self._queues[name] for name in sorted({x.queue for x in leases})),
        )

    def split(
        self, lease: LeaseRecord, reopened: Iterable[RowRange], manifest: Manifest
    ) -> list[LeaseRecord]:
        """The lease in pieces, of which those in `reopened`, joined ranges, are open again."""
        inside = [
            (max(span.start, lease.start), min(span.stop, lease.stop))
            for span in reopened
            if span.dataset_id == lease.dataset_id
        ]
        pieces, reached = [], lease.start
        for start, stop in (one for one in inside if one[0] < one[1]):
            pieces += [(reached, start, lease.state), (start, stop, LeaseState.REOPENED)]
            reached = stop
        pieces.append((reached, lease.stop, lease.state))

        def unit(start: int, stop: int) -> int:
            span = RowRange(lease.dataset_id, start, stop)
            return self._queue(span, manifest).cut.unit(start)

        return [
            replace(lease, start=start, stop=stop, unit=unit(start, stop), state=state)
            for start, stop, state in pieces
            if start < stop
        ]

    def tokens_of(self, leases: Iterable[LeaseRecord]) -> int:
        """How many tokens the rows of `leases` hold."""
        return self.tokens_in(sum(lease.stop - lease.start for lease in leases))

    def tokens_in(self, rows: int) -> int:
        """How many tokens so many rows hold."""
        return rows * self._block

    def _sources(self, t: Transaction, cursor: int) -> list[Source]:
        issued = t.datasets.cursors()
        sources = [
            Source(part.dataset_id, part.length, part.weight, issued.get(part.dataset_id, 0))
            for part in self.parts
        ]
        found = sum(source.cursor for source in sources)
        if found != cursor:
            # Rows would be issued a second time, or never.
            raise StateDamaged(
                f"leases reach row {found} of the run and the newest round records cursor="
                f"{cursor}; they are written together; run `atoll audit` on the state directory"
            )
        return sources

    def _lease(
        self, number: int, worker: str, span: RowRange, manifest: Manifest, taken: list[LeaseRecord]
    ) -> LeaseRecord:
        queue = self._queue(span, manifest)
        return LeaseRecord(
            number,
            worker,
            span.start,
            span.stop,
            dataset_id=span.dataset_id,
            shuffle_seed=self._seed,
            epoch=queue.epoch,
            unit=queue.cut.unit(span.start),
            lease_epoch=1 + _issued_before(span, taken),
        )

    def _queue(self, span: RowRange, manifest: Manifest) -> QueueRecord:
        """The queue that `span` lies in, as it was made or as it would be made now."""
        part = next(p for p in self.parts if p.dataset_id == span.dataset_id)
        epoch = span.start // part.length if part.length else 0
        made = queue_of(part, self._seed, epoch, manifest)
        return self._queues.setdefault(made.name, made)


def add_datasets(t: Transaction, manifest: Manifest) -> tuple[Part, ...]:
    """Records the datasets of a run that the ledger does not hold yet; returns all of them."""
    found = parts.parts_of(manifest.data.identity)
    t.datasets.add([DatasetRecord(p.dataset_id, p.name, p.length, p.weight) for p in found])
    return found


def queue_of(part: Part, shuffle_seed: int, epoch: int, manifest: Manifest) -> QueueRecord:
    """The queue of an epoch as it is made under `manifest`, without its bitmaps."""
    if part.length:
        cut = units.units_of(part.length, manifest.work.units)
        return QueueRecord(part.dataset_id, shuffle_seed, epoch, part.length, cut)
    rows = manifest.work.stream_unit_rows
    return QueueRecord(part.dataset_id, shuffle_seed, 0, 0, units=0, unit_rows=rows)


def _issued_before(span: RowRange, taken: Iterable[LeaseRecord]) -> int:
    """The lease epoch that these rows had in a lease that is `taken` again; 0 for fresh rows."""
    for lease in taken:
        if lease.dataset_id == span.dataset_id and lease.start <= span.start < lease.stop:
            return lease.lease_epoch
    return 0
