"""A round that is not published, as the coordinator remembers it."""

from dataclasses import replace

import pytest

from atoll.coordinator.rounds import under_way
from atoll.coordinator.rounds.under_way import UnderWay
from atoll.ledger.records import (
    ContributionRecord,
    LeaseRecord,
    LeaseState,
    RoundRecord,
    RoundState,
)

RECORD = RoundRecord(round=3, state=RoundState.OPEN, manifest_sha256="a" * 64, cursor=20)
LEASES = (
    LeaseRecord(3, "a", 0, 4),
    LeaseRecord(3, "a", 8, 10, LeaseState.DONE),
    LeaseRecord(3, "b", 4, 8, LeaseState.REOPENED),
    LeaseRecord(3, "c", 10, 12, LeaseState.TAKEN),
    LeaseRecord(3, "d", 12, 14, LeaseState.GIVEN_UP),
)
ROUND = UnderWay(RECORD, LEASES, {})


def contribution(made_for: int, worker_id: str) -> ContributionRecord:
    return ContributionRecord(
        round=made_for,
        worker_id=worker_id,
        applied=3,
        first=made_for,
        fragment=0,
        base="0" * 64,
        incarnation=1,
        sha256="0" * 64,
        nbytes=1,
        weight=1,
        rows=1,
        tokens=1,
        loss_sum=1.0,
        norm=1.0,
        residual=0.0,
        carried=0,
        receipt="receipt",
        accepted_wall=0.0,
    )


@pytest.mark.parametrize(
    ("state", "is_open", "is_planned"),
    [
        (RoundState.PLANNED, False, True),
        (RoundState.OPEN, True, False),
        (RoundState.FROZEN, False, False),
    ],
)
def test_round_knows_its_state(state, is_open, is_planned):
    found = replace(ROUND, record=replace(RECORD, state=state))

    assert (found.is_open, found.is_planned) == (is_open, is_planned)


def test_who_lost_its_lease_holds_nothing():
    assert {lease.worker_id for lease in ROUND.leases} == set("abcd")
    assert ROUND.holding == {"a"}


def test_ranges_are_a_workers_leases_that_have_not_ended():
    assert ROUND.ranges("a") == LEASES[:2] == under_way.held(LEASES, "a")
    assert ROUND.ranges("b") == ROUND.ranges("nobody") == ()


def test_contribution_makes_another_round_and_leaves_this_one():
    found = ROUND.with_contribution(contribution(3, "a"))

    assert found.accepted == {"a"}
    assert ROUND.accepted == set()


def test_contributions_of_one_worker_made_for_two_rounds_are_two():
    """A round may fold what was made for an earlier one."""
    found = ROUND.with_contribution(contribution(2, "a")).with_contribution(contribution(3, "a"))

    assert set(found.contributions) == {(2, "a"), (3, "a")}
    assert found.accepted == {"a"}
