"""Rounds and their leases, from the first plan to the published digests, in every ledger."""

from collections.abc import Callable
from dataclasses import fields, replace

import pytest

from atoll import errors
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import LeaseRecord, LeaseState, RoundPlan, RoundState
from tests import ledgers
from tests.ledgers import (
    MANIFEST,
    PUBLISHED,
    RUN,
    alone,
    contribution,
    extension,
    freeze_last,
    lease,
    open_round,
    plan,
    plan_second,
    publish_last,
)

# Rounds and leases


def test_begin_opens_the_first_round_with_its_leases(started: Ledger):
    latest = alone(started).rounds.latest()

    assert latest is not None
    assert (latest.round, latest.state, latest.cursor) == (1, RoundState.OPEN, 16)
    assert alone(started).leases.of_round(1) == [lease(1, "a", 0, 8), lease(1, "b", 8, 16)]


def test_begin_is_refused_when_a_round_exists(started: Ledger):
    before = started.state_hash()

    with pytest.raises(errors.StoreError, match="rounds up to 1"):
        ledgers.begin(started, plan(2, []))

    assert started.state_hash() == before


def test_begin_is_refused_for_another_round_than_the_first(ledger: Ledger):
    alone(ledger).run.create(RUN, MANIFEST)

    with pytest.raises(errors.WrongRound, match="round 2"):
        ledgers.begin(ledger, plan(2, []))

    assert alone(ledger).rounds.latest() is None


def test_round_after_the_last_published_one_can_be_begun(started: Ledger):
    """A run that had ended goes on."""
    ledgers.freeze(started, 1, None)
    ledgers.publish(started, 1, PUBLISHED)

    ledgers.begin(started, plan(2, [lease(2, "a", 16, 24)]))

    latest = alone(started).rounds.latest()
    assert latest is not None
    assert (latest.round, latest.state) == (2, RoundState.OPEN)
    assert alone(started).leases.of_round(2) == [lease(2, "a", 16, 24)]


def test_begin_is_refused_while_the_last_round_is_frozen(started: Ledger):
    ledgers.freeze(started, 1, None)
    before = started.state_hash()

    with pytest.raises(errors.StoreError, match="which is frozen"):
        ledgers.begin(started, plan(2, []))

    assert started.state_hash() == before


def test_leases_come_in_worker_then_start_order(started: Ledger):
    alone(started).rounds.extend(
        extension(1, [lease(1, "b", 3, 4), lease(1, "a", 90, 91)], cursor=91, taken=[])
    )

    found = [(le.worker_id, le.start) for le in alone(started).leases.of_round(1)]
    assert found == [("a", 0), ("a", 90), ("b", 3), ("b", 8)]


def test_extend_adds_leases_to_the_open_round_and_moves_its_cursor(started: Ledger):
    alone(started).rounds.extend(extension(1, [lease(1, "c", 16, 24)], cursor=24, taken=[]))

    assert alone(started).leases.of_round(1)[-1] == lease(1, "c", 16, 24)
    assert [r.cursor for r in alone(started).rounds.all()] == [24]


def test_extend_adds_leases_to_the_planned_round_when_there_is_one(started: Ledger):
    ledgers.freeze(started, 1, plan(2, []))

    alone(started).rounds.extend(
        extension(2, [lease(2, "c", 8, 16)], cursor=48, taken=[lease(1, "b", 8, 16)])
    )

    assert alone(started).leases.of_round(2) == [lease(2, "c", 8, 16)]
    assert [r.cursor for r in alone(started).rounds.all()] == [16, 48]
    assert alone(started).leases.reopened() == [
        replace(lease(1, "a", 0, 8), state=LeaseState.REOPENED)
    ]


@pytest.mark.parametrize("move", [freeze_last, publish_last])
def test_extend_is_refused_when_the_latest_round_is_closed(
    started: Ledger, move: Callable[[Ledger], None]
):
    move(started)
    before = started.state_hash()

    with pytest.raises(errors.WrongRound, match=r"round 1 is (frozen|published)"):
        alone(started).rounds.extend(extension(1, [lease(1, "c", 16, 24)], cursor=24, taken=[]))

    assert started.state_hash() == before


def test_extend_is_refused_when_no_round_has_begun(ledger: Ledger):
    with pytest.raises(errors.WrongRound, match="not in the ledger"):
        alone(ledger).rounds.extend(extension(1, [], cursor=0, taken=[]))


@pytest.mark.parametrize(
    "bad",
    [
        lease(2, "c", 16, 24),  # another round
        lease(1, "c", 24, 24),  # no row
        lease(1, "c", -1, 24),
        lease(1, "nobody", 16, 24),
        lease(1, "a", 0, 8),  # twice
        replace(lease(1, "c", 16, 24), state=LeaseState.DONE),
    ],
)
def test_extend_with_a_lease_that_breaks_a_rule_changes_nothing(started: Ledger, bad: LeaseRecord):
    before = started.state_hash()

    with pytest.raises(errors.StoreError):
        alone(started).rounds.extend(
            extension(1, [lease(1, "b", 99, 100), bad], cursor=24, taken=[])
        )

    assert started.state_hash() == before


def test_extend_is_refused_when_a_taken_lease_is_not_reopened(started: Ledger):
    before = started.state_hash()

    with pytest.raises(errors.StoreError, match="not among the reopened"):
        alone(started).rounds.extend(
            extension(1, [lease(1, "c", 8, 16)], cursor=24, taken=[lease(1, "b", 8, 16)])
        )

    assert started.state_hash() == before


def test_rounds_are_cut_by_first_and_last(started: Ledger):
    for number in (1, 2, 3):
        ledgers.freeze(started, number, plan(number + 1, []))
        ledgers.publish(started, number, PUBLISHED)

    assert [r.round for r in alone(started).rounds.all(first=2, last=3)] == [2, 3]


# Closing


def test_freeze_returns_the_contributions_in_order_and_reopens_the_other_leases(started: Ledger):
    alone(started).rounds.extend(extension(1, [lease(1, "c", 16, 24)], cursor=24, taken=[]))
    alone(started).contributions.accept(contribution("c"))
    alone(started).contributions.accept(contribution("a"))

    frozen = ledgers.freeze(started, 1, None)

    assert frozen == [contribution("a"), contribution("c")]
    assert [le.state for le in alone(started).leases.of_round(1)] == [
        LeaseState.DONE,
        LeaseState.REOPENED,
        LeaseState.DONE,
    ]
    assert [r.state for r in alone(started).rounds.all()] == [RoundState.FROZEN]


def test_freeze_reopens_a_lease_that_was_added_after_its_worker_contributed(started: Ledger):
    alone(started).contributions.accept(contribution("a"))
    late = lease(1, "a", 16, 24)
    alone(started).rounds.extend(extension(1, [late], cursor=24, taken=[]))

    ledgers.freeze(started, 1, None)

    assert replace(late, state=LeaseState.REOPENED) in alone(started).leases.reopened()


def test_freeze_plans_the_next_round_with_the_rows_that_this_one_lost(started: Ledger):
    alone(started).contributions.accept(contribution("a"))

    ledgers.freeze(started, 1, plan(2, [lease(2, "a", 8, 16)], taken=(lease(1, "b", 8, 16),)))

    assert [r.state for r in alone(started).rounds.all()] == [RoundState.FROZEN, RoundState.PLANNED]
    assert [le.state for le in alone(started).leases.of_round(1)] == [
        LeaseState.DONE,
        LeaseState.TAKEN,
    ]
    assert alone(started).leases.of_round(2) == [lease(2, "a", 8, 16)]
    assert alone(started).leases.reopened() == []


def test_reopened_leases_come_by_round_then_start(started: Ledger):
    ledgers.freeze(started, 1, plan(2, [lease(2, "c", 0, 4), lease(2, "a", 4, 8)]))
    ledgers.publish(started, 1, PUBLISHED)
    ledgers.freeze(started, 2, None)

    found = [(le.round, le.start) for le in alone(started).leases.reopened()]
    assert found == [(1, 0), (1, 8), (2, 0), (2, 4)]


FREEZE_REFUSALS = [
    (open_round, 2, None),
    (freeze_last, 1, None),
    (publish_last, 1, None),
    (plan_second, 2, None),
    (open_round, 1, plan(3, [])),
]


@pytest.mark.parametrize(("move", "number", "next_plan"), FREEZE_REFUSALS)
def test_freeze_is_refused_unless_open_and_followed_by_the_next_round(
    started: Ledger,
    move: Callable[[Ledger], None],
    number: int,
    next_plan: RoundPlan | None,
):
    move(started)
    before = started.state_hash()

    with pytest.raises(errors.WrongRound, match="round"):
        ledgers.freeze(started, number, next_plan)

    assert started.state_hash() == before


FAULTY_PLANS = [
    plan(2, [lease(2, "nobody", 16, 24)]),
    plan(2, [lease(1, "a", 16, 24)]),
    plan(2, [lease(2, "a", 16, 24)], taken=(lease(1, "c", 0, 8),)),
    plan(2, [lease(2, "a", 16, 24)], taken=(lease(1, "b", 8, 17),)),
    plan(2, [], taken=(lease(1, "b", 8, 16), lease(1, "b", 8, 16))),
    replace(plan(2, []), manifest_sha256="unknown"),
]


@pytest.mark.parametrize("faulty", FAULTY_PLANS)
def test_freeze_with_a_plan_that_breaks_a_rule_leaves_the_round_open(
    started: Ledger, faulty: RoundPlan
):
    before = started.state_hash()

    with pytest.raises(errors.StoreError):
        ledgers.freeze(started, 1, faulty)

    assert started.state_hash() == before


def test_publish_records_the_digests_and_opens_the_planned_round(started: Ledger):
    plan_second(started)

    ledgers.publish(started, 1, PUBLISHED)

    first, second = alone(started).rounds.all()
    assert first.state is RoundState.PUBLISHED
    assert {f.name: getattr(first, f.name) for f in fields(PUBLISHED)} == {
        f.name: getattr(PUBLISHED, f.name) for f in fields(PUBLISHED)
    }
    assert second.state is RoundState.OPEN
    assert second.hash is None


@pytest.mark.parametrize(
    ("move", "number"), [(open_round, 1), (publish_last, 1), (plan_second, 2), (freeze_last, 2)]
)
def test_publish_is_refused_unless_the_round_is_frozen(
    started: Ledger, move: Callable[[Ledger], None], number: int
):
    move(started)
    before = started.state_hash()

    with pytest.raises(errors.WrongRound, match=f"round {number} is"):
        ledgers.publish(started, number, PUBLISHED)

    assert started.state_hash() == before
