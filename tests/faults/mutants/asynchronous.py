"""Mutants of asynchronous runs: which leases are given and end, what is taken, how it counts."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from atoll.coordinator.accept import admission
from atoll.coordinator.rounds import assignments, leases
from atoll.coordinator.rounds.rounds import Rounds
from atoll.coordinator.rounds.under_way import UnderWay
from atoll.errors import LeaseLost
from atoll.ledger.records import RoundPlan
from atoll.ledger.tables.leases import LeaseTable
from atoll.ledger.tables.rounds import RoundTable
from atoll.simulate.faults.scenario import Scenario
from atoll.strategies.base import Lease, RoundView
from atoll.strategies.diloco.asynchronous import Asynchronous
from atoll.strategies.outer import OuterStep
from atoll.strategies.ticks import Ticks
from atoll.versions.manifests import Recorded
from tests.faults.mutants.mutant import (
    ASYNC,
    Mutant,
    Patch,
    Wanted,
    adding_to,
    answering,
    during,
    forgiving,
    having,
    misasking,
)

MUTANTS: list[Mutant] = []
_add = adding_to(MUTANTS)


def mutant(invariant: str, wanted: Wanted) -> Any:
    return _add(invariant, wanted, ASYNC)


def where(*kinds: str, **settings: Any) -> Wanted:
    """Asynchronous seeds with these settings and kinds of faults."""

    def wanted(scenario: Scenario) -> bool:
        found = scenario.settings
        return having(*kinds)(scenario) and all(found[name] == v for name, v in settings.items())

    return wanted


def _collects(scenario: Scenario) -> bool:
    """Rounds of several contributions, which a momentum takes in after two or more."""
    settings = scenario.settings
    is_long = settings["membership"]["grace_seconds"] == 5.0
    return bool(is_long and settings["outer"].get("delay", 0) >= 2)


def _waits(scenario: Scenario) -> bool:
    return bool(scenario.settings["membership"]["grace_seconds"] == 5.0)


def _may_be_few(scenario: Scenario) -> bool:
    """All islands but one may be dead while the run needs two."""
    least = scenario.settings["membership"]["min_workers"]
    return bool(least >= 2 and having("kill worker", "partition")(scenario))


@mutant("stale-is-refused", where("slow worker", max_staleness=0))
def a_contribution_of_any_age_is_taken(patch: Patch) -> None:
    """Also without a lease, which a freeze has ended."""

    def destination(self: Rounds, made_for: int) -> int | None:
        return next((r.number for r in self.open_rounds if r.number >= made_for), None)

    patch.setattr(Rounds, "destination", destination)
    patch.setattr(admission.Admission, "_check_rows", answering(None))
    patch.setattr(leases, "check_named", answering(None))
    forgiving(patch, LeaseTable, "finish", LeaseLost)


@mutant("weights-bits", _collects)
def contributions_of_a_round_are_averaged(patch: Patch) -> None:
    patch.setattr(Ticks, "moved", OuterStep.moved)


@mutant("weights-bits", _collects)
def ticks_are_made_in_another_order(patch: Patch) -> None:
    real = Ticks.moved
    patch.setattr(
        Ticks, "moved", lambda self, state, span, ticks: real(self, state, span, ticks[::-1])
    )


@mutant("tokens-by-plan", where("slow worker"))
def a_lease_starts_from_the_tokens_of_the_plan(patch: Patch) -> None:
    """What was folded since is not counted."""
    real = RoundTable.extend

    def extend(self: RoundTable, plan: RoundPlan) -> None:
        real(self, replace(plan, tokens=plan.tokens // 2))

    patch.setattr(RoundTable, "extend", extend)


@mutant("weights-bits", _collects)
def ticks_are_counted_from_each_round_on(patch: Patch) -> None:
    real = Asynchronous.outer
    patch.setattr(Asynchronous, "outer", lambda self, number, _: real(self, number, 0))


@mutant("weights-bits", where(staleness_weighting="inverse_sqrt", max_staleness=8))
def the_stale_count_as_the_fresh(patch: Patch) -> None:
    patch.setattr(Asynchronous, "factor", answering(1.0))


@mutant("ends-by-rule", where("slow worker"))
def a_freeze_ends_every_lease(patch: Patch) -> None:
    def ended(_: object, leases: Collection[Lease], **__: object) -> set[Lease]:
        return set(leases)

    misasking(patch, ended=ended)


@mutant("ends-by-rule", where("kill worker"))
def the_dead_keep_their_leases(patch: Patch) -> None:
    def ended(right: Any, leases: Collection[Lease], *, closing: int, live: Any) -> set[Lease]:
        everybody = {worker_id for _, worker_id in leases}
        kept: set[Lease] = right.ended(leases, closing=closing, live={*live, *everybody})
        return kept

    misasking(patch, ended=ended)


@mutant("ends-by-rule", where("slow worker", max_staleness=0))
def leases_that_are_too_old_outlive_a_freeze(patch: Patch) -> None:
    def ended(_: object, leases: Collection[Lease], *, live: Any, **__: object) -> set[Lease]:
        return {lease for lease in leases if lease[1] not in live}

    misasking(patch, ended=ended)


@mutant("closes-by-rule", _may_be_few)
def a_round_closes_below_min_workers(patch: Patch) -> None:
    def is_due(right: Any, view: RoundView, *, seconds: float) -> bool:
        few = right.manifest.membership.model_copy(update={"min_workers": 1})
        alone = Asynchronous(right.manifest.model_copy(update={"membership": few}))
        return alone.is_due(view, seconds=seconds)

    misasking(patch, is_due=is_due)


@mutant("closes-by-rule", _waits)
def a_round_has_no_window(patch: Patch) -> None:
    misasking(patch, is_due=lambda _, view, **__: bool(view.accepted))


def _asked(self: Rounds, _: str, version: int) -> int | None:
    """Without what waits to be folded."""
    return self.run_strategy.asked(version, [r.number for r in self.open_rounds], ())


@mutant("moves-together", where("slow worker"))
def a_base_is_leased_twice(patch: Patch) -> None:
    """Also to a worker that has made its contribution from it."""
    during(patch, Rounds, "give", UnderWay, "holding", property(answering(frozenset())))
    patch.setattr(Rounds, "asked", _asked)


@mutant("given-by-rule", where("slow worker", max_staleness=8))
def an_island_trains_on_before_its_work_is_folded(patch: Patch) -> None:
    patch.setattr(Rounds, "asked", _asked)


@mutant("one-lease-at-a-time", where("corrupt weights", "slow network", "replace worker"))
def what_is_left_of_an_older_version_is_kept(patch: Patch) -> None:
    during(patch, Rounds, "give", LeaseTable, "end", answering(0))


@mutant("rows-by-speed", where(dylu=True, sync_every=3))
def the_slow_are_given_as_much_as_the_fast(patch: Patch) -> None:
    def piece(self: Rounds, worker_id: str, recorded: Recorded) -> int:
        return recorded.round_strategy.piece(worker_id, dict)

    patch.setattr(Rounds, "_piece", piece)


@mutant("lease-is-stable", where(dylu=True, sync_every=3))
def a_new_speed_changes_what_is_leased(patch: Patch) -> None:
    """The rows that are told follow the speed of the moment, not the lease."""
    real = assignments._ranges

    def ranges(found: UnderWay, worker_id: str) -> Any:
        return real(found, worker_id)[:1] if len(worker_id) % 2 else real(found, worker_id)[1:]

    patch.setattr(assignments, "_ranges", ranges)


def _closes_at_once(scenario: Scenario) -> bool:
    """Without a window no round closes too early."""
    is_so = scenario.settings["membership"]["grace_seconds"] == 0.0
    return is_so and where("slow worker", max_staleness=1)(scenario)


@mutant("ends-by-rule", _closes_at_once)
def leases_of_published_rounds_are_forgotten(patch: Patch) -> None:
    patch.setattr(LeaseTable, "outliving", answering([]))
