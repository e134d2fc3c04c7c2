"""Mutants of the weights: how they are summed, published, snapshotted and replayed."""

from dataclasses import replace
from typing import Any

import torch

from atoll.coordinator.rounds import run_weights
from atoll.coordinator.rounds.assignments import Assignments
from atoll.coordinator.rounds.closing import Closing
from atoll.ledger import contributions, schema
from atoll.simulate.faults import run as simulation
from atoll.simulate.faults.scenario import Scenario
from atoll.sums import fold
from atoll.versions import replay
from tests.faults.mutants.mutant import Mutant, Patch, adding_to, edit, having

MUTANTS: list[Mutant] = []
mutant = adding_to(MUTANTS)


def _is_audited(scenario: Scenario) -> bool:
    """In full, of a run whose settings change."""
    return scenario.seed % simulation.AUDITED_EVERY == 0 and scenario.has("outer lr")


def _restores_momentum(scenario: Scenario) -> bool:
    return (
        scenario.has("crash coordinator")
        and scenario.settings["outer"]["optimizer"] != "sgd"
        and scenario.settings["storage"]["snapshot_every"] == 1
        and scenario.gap_seconds < 2
    )


def _has_many_messages(scenario: Scenario) -> bool:
    return scenario.has("slow network") and scenario.islands >= 5


@mutant("weights-bits")
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
    real = replay.apply_round

    def apply_round(state: Any, *args: Any, **more: Any) -> Any:
        for slot in state.slots.values():
            slot.zero_()
        return real(state, *args, **more)

    patch.setattr(replay, "apply_round", apply_round)


@mutant("snapshot-bits")
def momentum_is_not_saved(patch: Patch) -> None:
    edit(
        patch,
        run_weights.RunWeights,
        "snapshot",
        ("self._state.slots[buffer]", "torch.zeros_like(self._state.slots[buffer])"),
    )
    patch.setattr(run_weights, "torch", torch, raising=False)


@mutant("snapshot-bits")
def a_snapshot_is_named_after_the_version_before(patch: Patch) -> None:
    edit(
        patch,
        run_weights.RunWeights,
        "snapshot",
        ("return SnapshotRecord(version,", "return SnapshotRecord(max(1, version - 1),"),
    )


@mutant("published-is-recorded", _has_many_messages)
def a_version_is_published_before_it_is_recorded(patch: Patch) -> None:
    edit(
        patch,
        Closing,
        "_close",
        (
            "    self._ledger.publish(round_number, published)\n"
            "    self._versions.publish(round_number, digests)\n",
            "    self._versions.publish(round_number, digests)\n"
            "    self._ledger.publish(round_number, published)\n",
        ),
    )


@mutant("memory-follows-ledger")
def a_version_is_recorded_and_not_published(patch: Patch) -> None:
    edit(
        patch,
        Closing,
        "_close",
        ("    self._versions.publish(round_number, digests)\n", ""),
    )


@mutant("digest-agrees", having("corrupt weights"))
def other_weights_are_not_sent_to_fetch(patch: Patch) -> None:
    edit(
        patch,
        Assignments,
        "answer",
        (
            "request.version != current.version or request.digest != digest",
            "request.version != current.version",
        ),
    )


@mutant("restart-opens", having("crash coordinator"))
def replay_skips_a_contribution(patch: Patch) -> None:
    real = replay.replay

    class Short:
        def __init__(self, ledger: Any) -> None:
            self._ledger = ledger

        def __getattr__(self, name: str) -> Any:
            return getattr(self._ledger, name)

        def contributions(self, number: int) -> Any:
            found = self._ledger.contributions(number)
            return found[1:] if len(found) > 1 else found

    patch.setattr(
        replay, "replay", lambda state, ledger, *a, **m: real(state, Short(ledger), *a, **m)
    )


@mutant("audit-clean", _is_audited)
def a_round_is_chained_under_the_newest_manifest(patch: Patch) -> None:
    edit(
        patch,
        Closing,
        "_close",
        ("self._manifests.of_round(round_number).sha256", "self._manifests.newest.sha256"),
    )


@mutant("weights-bits", _restores_momentum)
def momentum_is_not_restored(patch: Patch) -> None:
    real = replay.snapshot_state

    def snapshot_state(*args: Any, **more: Any) -> Any:
        state = real(*args, **more)
        for slot in state.slots.values():
            slot.zero_()
        return state

    patch.setattr(replay, "snapshot_state", snapshot_state)
