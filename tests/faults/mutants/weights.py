"""Mutants of the weights: how they are summed, published, snapshotted and replayed."""

from dataclasses import replace
from typing import Any

from atoll.coordinator.rounds.assignments import Assignments
from atoll.coordinator.rounds.closing import Closing
from atoll.coordinator.rounds.run_weights import RunWeights
from atoll.ledger import chain
from atoll.ledger.records import Published, RoundRecord, SnapshotRecord
from atoll.ledger.tables import contributions, schema
from atoll.ledger.tables.contributions import ContributionTable
from atoll.protocol.messages import Assignment, AssignmentRequest
from atoll.simulate.faults import run as simulation
from atoll.simulate.faults.scenario import Scenario
from atoll.strategies.outer import OuterState
from atoll.sums import fold
from atoll.versions.replay import Applied, Replay, Version
from tests.faults.mutants.mutant import Mutant, Patch, adding_to, answering, during, having

MUTANTS: list[Mutant] = []
mutant = adding_to(MUTANTS)


def _is_audited(scenario: Scenario) -> bool:
    """In full, of a run whose settings change."""
    return scenario.seed % simulation.REPLAYED_EVERY == 0 and scenario.has("outer lr")


def _restores_momentum(scenario: Scenario) -> bool:
    return (
        scenario.has("crash coordinator")
        and scenario.settings["outer"]["optimizer"] != "sgd"
        and scenario.settings["storage"]["snapshot_every"] == 1
        and scenario.gap_seconds < 2
    )


def _has_no_momentum(scenario: Scenario) -> bool:
    """A last bit of the sum may be lost in the weights and kept in the momentum."""
    return bool(scenario.settings["outer"]["optimizer"] == "sgd")


def _has_many_messages(scenario: Scenario) -> bool:
    return scenario.has("slow network") and scenario.islands >= 5


@mutant("weights-bits", _has_no_momentum)
def the_fold_has_another_order(patch: Patch) -> None:
    backwards = schema.contributions.c.worker_id.desc()
    patch.setattr(
        contributions, "_OF_ROUND", contributions._OF_ROUND.order_by(None).order_by(backwards)
    )


@mutant("weights-bits")
def the_count_does_not_shrink_with_a_missing_worker(patch: Patch) -> None:
    real = fold.fold_tile
    most = [0]

    def fold_tile(terms: Any, *, unit: str) -> Any:
        total = real(terms, unit=unit)
        most[0] = max(most[0], total.count)
        return replace(total, count=most[0])

    patch.setattr(fold, "fold_tile", fold_tile)


@mutant("weights-bits")
def every_contribution_weighs_the_same(patch: Patch) -> None:
    real = fold.fold_tile

    def fold_tile(terms: Any, *, unit: str) -> Any:
        return real(((delta, 1 + index) for index, (delta, _) in enumerate(terms)), unit=unit)

    patch.setattr(fold, "fold_tile", fold_tile)


@mutant("weights-bits")
def momentum_is_not_carried_on(patch: Patch) -> None:
    real = Replay.apply

    def apply(self: Replay, version: Version, *args: Any, **named: Any) -> Applied:
        for slot in version.state.slots.values():
            slot.zero_()
        return real(self, version, *args, **named)

    patch.setattr(Replay, "apply", apply)


@mutant("snapshot-bits")
def momentum_is_not_saved(patch: Patch) -> None:
    real = RunWeights.snapshot

    def snapshot(self: RunWeights) -> SnapshotRecord:
        whole = self._version
        zeros = {name: slot.new_zeros(len(slot)) for name, slot in whole.state.slots.items()}
        self._version = replace(whole, state=replace(whole.state, slots=zeros))
        try:
            return real(self)
        finally:
            self._version = whole

    patch.setattr(RunWeights, "snapshot", snapshot)


@mutant("snapshot-bits")
def a_snapshot_is_named_after_the_version_before(patch: Patch) -> None:
    real = RunWeights.snapshot

    def snapshot(self: RunWeights) -> SnapshotRecord:
        made = real(self)
        return replace(made, version=max(1, made.version - 1))

    patch.setattr(RunWeights, "snapshot", snapshot)


@mutant("published-is-recorded", _has_many_messages)
def a_version_is_published_before_it_is_recorded(patch: Patch) -> None:
    def publish(self: Closing, round_number: int, link: Published) -> None:
        self.weights.publish()
        opened = [r.number for r in self.rounds.under_way if r.is_planned]
        with self.ledger.writing() as t:
            t.rounds.publish(round_number, link, opens=opened)

    patch.setattr(Closing, "_publish", publish)


@mutant("memory-follows-ledger")
def a_version_is_recorded_and_not_published(patch: Patch) -> None:
    patch.setattr(RunWeights, "publish", answering(None))


@mutant("digest-agrees", having("corrupt weights"))
def other_weights_are_not_sent_to_fetch(patch: Patch) -> None:
    real = Assignments.answer

    def answer(self: Assignments, request: AssignmentRequest) -> Assignment:
        current = self.weights.current
        if request.version == current.version:
            right = current.digests.published.root
            request = request.model_copy(update={"digest": right})
        return real(self, request)

    patch.setattr(Assignments, "answer", answer)


@mutant("restart-opens", having("crash coordinator"))
def replay_skips_a_contribution(patch: Patch) -> None:
    real = ContributionTable.of_round

    def short(self: ContributionTable, number: int) -> Any:
        found = real(self, number)
        return found[1:] if len(found) > 1 else found

    during(patch, RunWeights, "_restore", ContributionTable, "of_round", short)


@mutant("audit-clean", _is_audited)
def a_round_is_chained_under_the_newest_manifest(patch: Patch) -> None:
    newest: list[str] = []
    real, link = chain.round_hash, Closing._link

    def under_newest(record: RoundRecord, contributions: Any) -> str:
        return real(replace(record, manifest_sha256=newest[0]), contributions)

    def remembering(self: Closing, *args: Any) -> Published:
        newest[:] = [self.manifests.newest.sha256]
        return link(self, *args)

    patch.setattr(Closing, "_link", remembering)
    during(patch, Closing, "_link", chain, "round_hash", under_newest)


@mutant("weights-bits", _restores_momentum)
def momentum_is_not_restored(patch: Patch) -> None:
    real = Replay._stored

    def stored(self: Replay, snapshot: SnapshotRecord) -> OuterState:
        state = real(self, snapshot)
        for slot in state.slots.values():
            slot.zero_()
        return state

    patch.setattr(Replay, "_stored", stored)
