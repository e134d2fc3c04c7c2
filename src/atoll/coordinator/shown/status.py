"""What the coordinator shows: a status made from the ledger's rows and the heartbeats."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from atoll.coordinator.counters import Counters
from atoll.coordinator.members.membership import Membership
from atoll.coordinator.members.workers import Registry
from atoll.coordinator.rounds.assignments import Assignments
from atoll.coordinator.rounds.disk_space import DiskSpace
from atoll.coordinator.rounds.rounds import Rounds
from atoll.coordinator.rounds.run_weights import RunWeights
from atoll.coordinator.shown import gathers
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import RoundState, RoundTotals
from atoll.proof import losses
from atoll.protocol.messages import RoundStatus, Status, WorkerStatus
from atoll.versions.manifests import Manifests

HISTORY_ROUNDS = 200  # newest rounds shown; the ledger has them all
_NOTHING = RoundTotals(contributions=0, tokens=0, loss_sum=0.0)


def workers(registry: Registry) -> tuple[WorkerStatus, ...]:
    """Every worker that ever registered, and what it tells of itself."""
    live, heartbeats = registry.live(), registry.heartbeats
    return tuple(
        WorkerStatus(
            worker_id=worker.worker_id,
            incarnation=worker.incarnation,
            active=worker.active,
            live=worker.worker_id in live,
            seconds_since_heard=heartbeats.seconds_since(worker.worker_id) or 0.0,
            hostname=registry.hostname(worker.worker_id),
            telemetry=heartbeats.telemetry(worker.worker_id),
        )
        for worker in registry.known()
    )


@dataclass(frozen=True, kw_only=True)
class Report:
    """Reads, from request threads; changes nothing. Its parts may be of different moments."""

    run_id: str
    ledger: Ledger
    membership: Membership
    manifests: Manifests
    rounds: Rounds
    weights: RunWeights
    assignments: Assignments
    counters: Counters
    disk: DiskSpace

    def status(self) -> Status:
        """The run at this moment."""
        current, in_force = self.weights.current, self.manifests.in_force
        manifest, counted = in_force.manifest, self.counters.counted
        is_paused = self.membership.control.command.action == "pause"
        missing = self.rounds.waiting_for()
        return Status(
            run_id=self.run_id,
            name=manifest.name,
            state=self._state(is_paused=is_paused),
            version=current.version,
            rounds=manifest.stop.rounds or None,
            digest=current.digests.master.root,
            manifest_sha256=in_force.sha256,
            tokens=self.rounds.tokens,
            workers=workers(self.membership.registry),
            history=self._history(current.version),
            waiting_for=self._begun(missing) if is_paused else tuple(missing),
            refusals=dict(self.counters.refusals),
            stale_contributions=counted["stale_contributions"],
            resyncs=counted["resyncs"],
            bytes_received=counted["bytes_received"],
            bytes_sent=counted["bytes_sent"],
            refused_queues=self.rounds.dispatch.refused,
            storage_full=self.disk.reason,
            gather=gathers.status(self.rounds, self.counters)
            if in_force.any_strategy.gathers
            else None,
        )

    def _begun(self, missing: Iterable[str]) -> tuple[str, ...]:
        """Those that train what the next round folds, so that a pause waits for them."""
        oldest, begun = self.rounds.oldest_held(), self.assignments.begun
        told = self.membership.registry.heartbeats.telemetry

        def has_begun(worker_id: str) -> bool:
            needed = oldest.get(worker_id)
            # It may have been given later ones ahead. An earlier life of the coordinator may have
            # given it: the worker tells what it trains.
            given = max(begun.get(worker_id, 0), told(worker_id).round or 0)
            return needed is None or needed <= given

        return tuple(w for w in missing if has_begun(w))

    def _state(self, *, is_paused: bool) -> Literal["waiting", "training", "paused", "finished"]:
        if self.rounds.is_finished():
            return "finished"
        if is_paused:
            return "paused"
        return "waiting" if self.rounds.newest is None else "training"

    def _history(self, version: int) -> tuple[RoundStatus, ...]:
        first = max(1, version - HISTORY_ROUNDS + 1)
        with self.ledger.reading() as t:
            held_out = losses.held_out_losses(t, first=0 if first == 1 else first)
            records = t.rounds.all(first=first, last=version)
            folded = t.contributions.totals(first=first, last=version)
        # The initial weights, version 0, are shown before the first round.
        digests: dict[int, str | None] = {0: None} if first == 1 else {}
        for r in records:
            digests[r.round] = r.master_digest if r.state is RoundState.PUBLISHED else None

        def shown(number: int) -> RoundStatus:
            totals = folded.get(number, _NOTHING)
            return RoundStatus(
                round=number,
                contributions=totals.contributions,
                tokens=totals.tokens,
                train_loss=totals.loss_sum / totals.tokens if totals.tokens else None,
                evaluation_loss=held_out.get(number),
                digest=digests[number],
                staleness=totals.staleness,
            )

        return tuple(map(shown, digests))
