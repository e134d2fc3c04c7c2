"""Mutants of rounds: which rows they give out, and when they freeze, publish and close."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from atoll.coordinator.rounds.assignments import Assignments
from atoll.coordinator.rounds.dispatch import Dispatch
from atoll.coordinator.rounds.rounds import Rounds
from atoll.data.plan import Source
from atoll.ledger.records import RoundPlan, RoundState
from atoll.ledger.tables.leases import LeaseTable
from atoll.ledger.tables.rounds import RoundTable
from atoll.protocol.messages import Assignment, AssignmentRequest
from atoll.simulate.faults.scenario import Scenario
from atoll.strategies.base import RoundView
from tests.faults.mutants.mutant import (
    RELAY,
    STREAMING,
    Mutant,
    Otherwise,
    Patch,
    adding_to,
    answering,
    during,
    having,
    in_two,
    misasking,
    streaming,
    waiting_for_all,
)

MUTANTS: list[Mutant] = []
mutant = adding_to(MUTANTS)


def _splits_leases(scenario: Scenario) -> bool:
    """Of several datasets, a worker has several leases, and one that follows takes part of one."""
    settings = scenario.settings
    is_uneven = [part["weight"] for part in scenario.data.get("datasets", ())] == [3, 1]
    rows = settings["sync_every"] * settings["inner"]["batch"]
    loses_many = having("kill worker", "stop worker")(scenario)
    waits = settings["membership"]["min_workers"] >= 2
    reissues = settings["work"]["policy"] == "exactly_once"
    return is_uneven and rows >= 4 and loses_many and waits and reissues


def _has_grace(scenario: Scenario) -> bool:
    settings = scenario.settings["membership"]
    return bool(0 < settings["quorum"] < scenario.islands and settings["grace_seconds"] > 0)


@mutant("row-issued-once")
def the_cursor_does_not_move(patch: Patch) -> None:
    real = Dispatch.plan

    def sources(self: Dispatch, *_: Any) -> list[Source]:
        return [Source(part.dataset_id, part.length, part.weight, 0) for part in self.parts]

    def plan(self: Dispatch, *args: Any, cursor: int, tokens: int) -> RoundPlan:
        return replace(real(self, *args, cursor=cursor, tokens=tokens), cursor=cursor)

    patch.setattr(Dispatch, "_sources", sources)
    patch.setattr(Dispatch, "plan", plan)


@mutant("row-issued-once")
def reopened_rows_are_issued_twice(patch: Patch) -> None:
    patch.setattr(LeaseTable, "_take", answering(None))


@mutant("ends-by-rule")
def rows_of_a_missing_worker_are_not_reopened(patch: Patch) -> None:
    patch.setattr(LeaseTable, "end", answering(0))


@mutant("row-not-lost")
def reopened_rows_are_taken_and_not_given_out(patch: Patch) -> None:
    real = Rounds._plan

    def plan(self: Rounds, *args: Any, **more: Any) -> Any:
        made = real(self, *args, **more)
        if not made.taken:
            return made
        lost = {(t.dataset_id, t.start, t.stop) for t in made.taken}
        kept = tuple(x for x in made.leases if (x.dataset_id, x.start, x.stop) not in lost)
        return replace(made, leases=kept or made.leases)

    patch.setattr(Rounds, "_plan", plan)


@mutant("row-not-lost", _splits_leases)
def what_is_left_of_a_taken_lease_is_lost(patch: Patch) -> None:
    patch.setattr(LeaseTable, "_keep_reopened", answering(None))


@mutant("lease-is-stable")
def a_repeated_question_gets_other_rows(patch: Patch) -> None:
    asked: dict[tuple[int, str], int] = {}
    real = Assignments._next

    def next_(self: Assignments, request: AssignmentRequest, *held: Any) -> Assignment:
        given = real(self, request, *held)
        key = (given.round or 0, request.identity.worker_id)
        asked[key] = asked.get(key, -1) + 1
        moved = tuple(
            replace(span, start=span.start + asked[key], stop=span.stop + 9)
            for span in given.ranges
        )
        return given.model_copy(update={"ranges": moved if asked[key] else given.ranges})

    patch.setattr(Assignments, "_next", next_)


@mutant("next-is-planned")
def a_round_freezes_without_a_plan(patch: Patch) -> None:
    real = RoundTable.freeze
    patch.setattr(
        RoundTable, "freeze", lambda self, number, _, **more: real(self, number, None, **more)
    )


@mutant("next-is-planned")
def freeze_and_plan_are_two_transactions(patch: Patch) -> None:
    in_two(patch, RoundTable, "_insert")


@mutant("moves-together")
def state_and_digests_are_two_transactions(patch: Patch) -> None:
    in_two(patch, RoundTable, "_check_before", within=(RoundTable, "publish"))


@mutant("round-order")
def publishing_does_not_open_the_next_round(patch: Patch) -> None:
    real = RoundTable.publish
    patch.setattr(RoundTable, "publish", lambda self, *args, **_: real(self, *args))


@mutant("round-order")
def a_planned_round_is_open_at_once(patch: Patch) -> None:
    real = RoundTable._insert
    patch.setattr(RoundTable, "_insert", lambda self, plan, _: real(self, plan, RoundState.OPEN))


@mutant("round-order")
def one_round_too_many_is_open_from_the_start(patch: Patch) -> None:
    during(patch, Rounds, "_begin", Rounds, "run_strategy", _leading(1))


@mutant("next-is-planned", size=RELAY)
def one_round_too_few_is_open_from_the_start(patch: Patch) -> None:
    during(patch, Rounds, "_begin", Rounds, "run_strategy", _leading(-1))


def _leading(more: int) -> property:
    """A `Rounds.run_strategy` with so many rounds more in its lead."""
    real = vars(Rounds)["run_strategy"].fget
    return property(lambda self: Otherwise(real(self), {}, lead=real(self).lead + more))


@mutant("ends-by-rule", size=RELAY)
def a_freeze_ends_leases_of_other_rounds_too(patch: Patch) -> None:
    misasking(patch, ended=lambda _, leases, **__: set(leases))


@mutant("ends-by-rule")
def a_freeze_ends_no_lease(patch: Patch) -> None:
    misasking(patch, ended=lambda *_, **__: set())


@mutant("fragment-by-rule", size=RELAY)
def a_round_is_planned_with_the_fragment_of_another(patch: Patch) -> None:
    real = Rounds._planned
    patch.setattr(
        Rounds, "_planned", lambda *args, **more: replace(real(*args, **more), fragment=0)
    )


@mutant("tokens-by-plan", streaming(delay_steps=1), STREAMING)
def a_plan_forgets_what_is_leased_before_it(patch: Patch) -> None:
    during(patch, Rounds, "freeze", Dispatch, "tokens_of", answering(0))


@mutant("tokens-by-plan")
def a_round_starts_from_the_tokens_of_its_own_too(patch: Patch) -> None:
    real = Assignments._next

    def next_(self: Assignments, *args: Any) -> Assignment:
        given = real(self, *args)
        return given.model_copy(update={"global_tokens": self.rounds.tokens + 1})

    patch.setattr(Assignments, "_next", next_)


@mutant("closes-by-rule")
def a_lone_worker_closes_the_round(patch: Patch) -> None:
    misasking(patch, is_due=lambda _, view, **__: len(view.accepted) > 0)


@mutant("closes-by-rule")
def a_live_worker_is_not_waited_for(patch: Patch) -> None:
    misasking(patch, is_due=_as_if(lambda view: replace(view, live=frozenset())))


@mutant("closes-by-rule", _has_grace)
def the_grace_period_is_over_at_once(patch: Patch) -> None:
    misasking(patch, is_due=lambda right, view, **_: right.is_due(view, seconds=math.inf))


@mutant("liveness", waiting_for_all("kill worker"))
def a_dead_worker_is_waited_for(patch: Patch) -> None:
    misasking(patch, is_due=_as_if(lambda view: replace(view, live=view.planned)))


def _as_if(seen: Callable[[RoundView], RoundView]) -> Callable[..., bool]:
    """The strategy's own closing rule, over another view than the right one."""
    return lambda right, view, **more: right.is_due(seen(view), **more)
