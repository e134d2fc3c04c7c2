"""What the coordinator shows: a status made from the ledger's rows and the heartbeats."""

from collections.abc import Mapping
from typing import Literal

from atoll.coordinator.members.heartbeats import Heartbeats
from atoll.coordinator.members.workers import Registry
from atoll.coordinator.rounds.rounds import Rounds
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import RoundRecord, RoundState, RoundTotals
from atoll.proof import losses
from atoll.protocol.manifest import Manifest
from atoll.protocol.messages import RoundStatus, Status, WorkerStatus

HISTORY_ROUNDS = 200  # newest rounds shown; the ledger has them all
_NOTHING = RoundTotals(contributions=0, tokens=0, loss_sum=0.0)


class Report:
    """Reads, from request threads; changes nothing. Its parts may be of different moments."""

    def __init__(
        self,
        ledger: Ledger,
        registry: Registry,
        heartbeats: Heartbeats,
        rounds: Rounds,
    ) -> None:
        self._ledger = ledger
        self._registry = registry
        self._heartbeats = heartbeats
        self._rounds = rounds

    def status(
        self,
        *,
        run_id: str,
        manifest: Manifest,
        manifest_sha256: str,
        version: int,
        digest: str,
        begun: Mapping[str, int] | None,
        counters: Mapping[str, int],
        refusals: Mapping[str, int],
        storage_full: str,
    ) -> Status:
        """The run at this moment; of a paused one, `begun` is the round each worker was given."""
        history = self._history(version)
        return Status(
            run_id=run_id,
            name=manifest.name,
            state=self._state(is_paused=begun is not None),
            version=version,
            rounds=manifest.stop.rounds or None,
            digest=digest,
            manifest_sha256=manifest_sha256,
            tokens=self._rounds.tokens,
            workers=self._workers(),
            history=history,
            waiting_for=tuple(w for w in self._rounds.waiting_for() if self._is_at_work(w, begun)),
            refusals=dict(refusals),
            stale_contributions=counters.get("stale_contributions", 0),
            resyncs=counters.get("resyncs", 0),
            bytes_received=counters.get("bytes_received", 0),
            bytes_sent=counters.get("bytes_sent", 0),
            refused_queues=self._rounds.dispatch.refused,
            storage_full=storage_full,
        )

    def _is_at_work(self, worker_id: str, begun: Mapping[str, int] | None) -> bool:
        """Whether the worker has begun the round that closes next, or nothing keeps it from it."""
        oldest = next(iter(self._rounds.under_way), None)
        if begun is None or oldest is None:
            return True
        # An earlier life of the coordinator may have given it; the worker tells what it trains.
        told = self._heartbeats.telemetry(worker_id).round
        return oldest.number in (begun.get(worker_id), told)

    def _state(self, *, is_paused: bool) -> Literal["waiting", "training", "paused", "finished"]:
        if self._rounds.is_finished():
            return "finished"
        if is_paused:
            return "paused"
        return "waiting" if self._rounds.newest is None else "training"

    def _workers(self) -> tuple[WorkerStatus, ...]:
        live = self._registry.live()
        return tuple(
            WorkerStatus(
                worker_id=worker.worker_id,
                incarnation=worker.incarnation,
                active=worker.active,
                live=worker.worker_id in live,
                seconds_since_heard=self._heartbeats.seconds_since(worker.worker_id) or 0.0,
                hostname=self._registry.hostname(worker.worker_id),
                telemetry=self._heartbeats.telemetry(worker.worker_id),
            )
            for worker in self._registry.known()
        )

    def _history(self, version: int) -> tuple[RoundStatus, ...]:
        first = max(1, version - HISTORY_ROUNDS + 1)
        with self._ledger.reading() as t:
            held_out = losses.held_out_losses(t, first=0 if first == 1 else first)
            records = t.rounds.all(first=first, last=version)
            folded = t.contributions.totals(first=first, last=version)
        # The initial weights, version 0, are shown before the first round.
        start = [_round(0, None, _NOTHING, held_out.get(0))] if first == 1 else []
        return (
            *start,
            *(
                _round(r.round, _digest(r), folded.get(r.round, _NOTHING), held_out.get(r.round))
                for r in records
            ),
        )


def _digest(record: RoundRecord) -> str | None:
    return record.master_digest if record.state is RoundState.PUBLISHED else None


def _round(
    number: int, digest: str | None, folded: RoundTotals, held_out: float | None
) -> RoundStatus:
    return RoundStatus(
        round=number,
        contributions=folded.contributions,
        tokens=folded.tokens,
        train_loss=folded.loss_sum / folded.tokens if folded.tokens else None,
        evaluation_loss=held_out,
        digest=digest,
    )
