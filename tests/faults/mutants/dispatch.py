"""Mutants of dispatch: lease epochs, queues of units, policies and deadlines."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from atoll.coordinator import service
from atoll.coordinator.members.control import Control
from atoll.coordinator.members.workers import Registry
from atoll.coordinator.rounds import dispatch, leases
from atoll.coordinator.rounds.dispatch import Dispatch
from atoll.coordinator.rounds.rounds import Rounds
from atoll.data import plan as plans
from atoll.ledger.tables import leases as lease_table
from atoll.ledger.tables import schema
from atoll.ledger.tables.contributions import ContributionTable
from atoll.ledger.tables.leases import LeaseTable
from atoll.ledger.tables.queues import QueueTable
from atoll.simulate.faults.scenario import Scenario
from atoll.strategies.base import Lease
from tests.faults.mutants.mutant import (
    Mutant,
    Patch,
    adding_to,
    answering,
    during,
    having,
    in_two,
    never_paused,
    working,
)

MUTANTS: list[Mutant] = []
mutant = adding_to(MUTANTS)


def _has_deadlines(scenario: Scenario) -> bool:
    return bool(scenario.settings["work"]["lease_seconds"]) and scenario.has("slow worker")


def _pauses_with_deadlines(scenario: Scenario) -> bool:
    return scenario.settings["work"]["lease_seconds"] == 8.0 and scenario.has("operator")


def _ends_epochs(scenario: Scenario) -> bool:
    return bool(0 < scenario.data.get("rows", 0) < 40)


@mutant("lease-epoch-grows", working(policy="exactly_once"))
def rows_issued_again_have_the_same_lease_epoch(patch: Patch) -> None:
    patch.setattr(dispatch, "_issued_before", answering(0))


@mutant("lease-epoch-grows", having("replace worker"))
def a_lease_is_handed_over_under_the_same_lease_epoch(patch: Patch) -> None:
    same = lease_table._HAND_OVER.values(lease_epoch=schema.leases.c.lease_epoch)
    patch.setattr(lease_table, "_HAND_OVER", same)


@mutant("lease-of-latest-life", having("replace worker"))
def a_new_life_does_not_take_the_leases_over(patch: Patch) -> None:
    patch.setattr(LeaseTable, "hand_over", answering(None))


@mutant("queue-agrees")
def bitmaps_of_done_units_are_another_transaction(patch: Patch) -> None:
    later: list[Any] = []
    real, mark_done = ContributionTable.accept, QueueTable.mark_done

    class Marking:
        @staticmethod
        def mark(queues: QueueTable, leases: Any) -> None:
            mark_done(queues, leases)

    def accept_then_mark(self: ContributionTable, contribution: Any) -> Any:
        later.clear()
        accepted = real(self, contribution)
        for marked in later:
            Marking.mark(*marked)
        return accepted

    patch.setattr(QueueTable, "mark_done", lambda self, leases: later.append((self, leases)))
    patch.setattr(ContributionTable, "accept", accept_then_mark)
    in_two(patch, Marking, "mark")


@mutant("queue-agrees")
def issued_units_are_not_marked(patch: Patch) -> None:
    patch.setattr(QueueTable, "mark_issued", answering(None))


@mutant("row-issued-once", working(policy="exactly_once", units=1))
def a_unit_issued_again_starts_at_its_first_row(patch: Patch) -> None:
    real = Dispatch._lease

    def lease(self: Dispatch, number: int, worker_id: str, span: Any, *rest: Any) -> Any:
        made = real(self, number, worker_id, span, *rest)
        if made.lease_epoch == 1:
            return made
        return replace(made, start=self._queues[made.queue].cut.span(made.unit)[0])

    patch.setattr(Dispatch, "_lease", lease)


@mutant("policy-kept", working(policy="at_most_once", kinds=("kill worker",)))
def at_most_once_issues_again(patch: Patch) -> None:
    patch.setattr(LeaseTable, "end", _ending(reissue=True))


@mutant("policy-kept", working(policy="exactly_once", kinds=("kill worker",)))
def exactly_once_gives_rows_up(patch: Patch) -> None:
    patch.setattr(LeaseTable, "end", _ending(reissue=False))


def _ending(*, reissue: bool) -> Callable[..., int]:
    real = LeaseTable.end
    return lambda self, keys, **_: real(self, keys, reissue=reissue)


@mutant("reopened-goes-first", working(policy="exactly_once", kinds=("kill worker",)))
def reopened_rows_wait_for_ever(patch: Patch) -> None:
    real = plans.plan
    patch.setattr(
        plans, "plan", lambda workers, **given: real(workers, **{**given, "reopened": ()})
    )


@mutant("weights-followed", lambda scenario: scenario.data["kind"] == "mixture")
def all_rows_are_of_one_dataset(patch: Patch) -> None:
    patch.setattr(plans, "shares", lambda sources, _, rows: [rows, *[0] * (len(sources) - 1)])


@mutant("members-get-rows", having("kill worker", "operator"))
def rows_are_leased_to_who_is_out(patch: Patch) -> None:
    def known(self: Registry) -> frozenset[str]:
        return frozenset(worker.worker_id for worker in self.known())

    during(patch, Rounds, "freeze", Registry, "live", known)


@mutant("lease-ends-in-time", _has_deadlines)
def a_deadline_is_never_over(patch: Patch) -> None:
    patch.setattr(leases.Deadlines, "overdue", answering([]))


@mutant("lease-ends-in-time", _has_deadlines)
def a_deadline_is_over_too_early(patch: Patch) -> None:
    real = leases.Deadlines.overdue

    def overdue(self: leases.Deadlines, *, lease_seconds: float) -> list[Lease]:
        return real(self, lease_seconds=lease_seconds / 4)

    patch.setattr(leases.Deadlines, "overdue", overdue)


@mutant("lease-in-its-unit", _ends_epochs)
def a_lease_reaches_into_the_next_epoch(patch: Patch) -> None:
    real = plans._epochs
    patch.setattr(plans, "_epochs", lambda source, *span: real(replace(source, length=0), *span))


@mutant("lease-in-its-unit", _ends_epochs)
def rows_of_a_later_epoch_are_named_after_the_first(patch: Patch) -> None:
    real = dispatch.queue_of
    patch.setattr(
        dispatch, "queue_of", lambda part, seed, _, manifest: real(part, seed, 0, manifest)
    )


@mutant("lease-ends-in-time", _pauses_with_deadlines)
def a_lease_ends_in_a_pause(patch: Patch) -> None:
    during(patch, service.Coordinator, "_advance", Control, "command", never_paused())


@mutant("lease-ends-in-time", _pauses_with_deadlines)
def a_pause_counts_as_time_of_a_lease(patch: Patch) -> None:
    patch.setattr(Rounds, "restart_deadlines", answering(None))
