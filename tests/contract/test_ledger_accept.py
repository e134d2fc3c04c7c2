"""What every ledger accepts as a contribution, and what it refuses."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from atoll import errors
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import ContributionRecord, LeaseState
from tests import ledgers
from tests.ledgers import (
    PUBLISHED,
    alone,
    contribution,
    freeze_last,
    lease,
    open_round,
    plan,
    plan_second,
    play,
    publish_last,
)


def test_accept_records_the_contribution_and_marks_its_leases_done(started: Ledger):
    accepted = alone(started).contributions.accept(contribution("a"))

    assert accepted == contribution("a")
    assert alone(started).contributions.of_round(1) == [contribution("a")]
    assert [le.state for le in alone(started).leases.of_round(1)] == [
        LeaseState.DONE,
        LeaseState.LEASED,
    ]


def test_contributions_come_in_code_point_order(ledger: Ledger):
    play(ledger)

    assert [c.worker_id for c in alone(ledger).contributions.of_round(1)] == ["B", "a"]


def test_tokens_are_counted_once_their_round_is_frozen(started: Ledger):
    assert alone(started).contributions.counted_tokens() == 0
    alone(started).contributions.accept(contribution("a"))
    alone(started).contributions.accept(contribution("b"))
    while_open = alone(started).contributions.counted_tokens()

    ledgers.freeze(started, 1, None)
    frozen = alone(started).contributions.counted_tokens()
    ledgers.publish(started, 1, PUBLISHED)

    assert (while_open, frozen, alone(started).contributions.counted_tokens()) == (0, 2**34, 2**34)


def test_accepted_blobs_are_those_of_a_round_and_later_ones(started: Ledger):
    alone(started).contributions.accept(contribution("a"))
    ledgers.freeze(started, 1, plan(2, [lease(2, "a", 16, 24)]))
    ledgers.publish(started, 1, PUBLISHED)
    alone(started).contributions.accept(contribution("a", round=2, sha256="blob of round 2"))

    assert alone(started).contributions.blobs() == {"blob of a", "blob of round 2"}
    assert alone(started).contributions.blobs(first=2) == {"blob of round 2"}
    assert alone(started).contributions.blobs(first=3) == set()


def test_accept_of_the_same_bytes_returns_the_first_record(started: Ledger):
    first = alone(started).contributions.accept(contribution("a"))
    before = started.state_hash()

    again = alone(started).contributions.accept(
        contribution("a", receipt="other", accepted_wall=9.0, norm=2.0)
    )

    assert again == first
    assert started.state_hash() == before


@pytest.mark.parametrize("move", [freeze_last, publish_last])
def test_accept_of_the_same_bytes_returns_the_first_record_when_the_round_is_closed(
    started: Ledger, move: Callable[[Ledger], None]
):
    first = alone(started).contributions.accept(contribution("a"))
    move(started)

    assert alone(started).contributions.accept(contribution("a", receipt="other")) == first


def test_accept_returns_the_first_record_to_a_later_incarnation(started: Ledger):
    first = alone(started).contributions.accept(contribution("a"))
    alone(started).members.register("a", "key a", wall=6.0)

    assert alone(started).contributions.accept(contribution("a", incarnation=2)) == first


def take_over(ledger: Ledger) -> None:
    alone(ledger).members.register("a", "key a", wall=6.0)


def accept_a(ledger: Ledger) -> None:
    alone(ledger).contributions.accept(contribution("a"))


def accept_a_then_publish(ledger: Ledger) -> None:
    accept_a(ledger)
    publish_last(ledger)


def accept_a_then_take_over(ledger: Ledger) -> None:
    accept_a(ledger)
    take_over(ledger)


REFUSALS = [
    (open_round, contribution("nobody"), errors.UnknownWorker),
    (open_round, contribution("nobody", round=9, incarnation=7), errors.UnknownWorker),
    (take_over, contribution("a"), errors.Fenced),
    (take_over, contribution("a", round=9), errors.Fenced),
    (open_round, contribution("a", incarnation=2), errors.Fenced),
    (accept_a_then_take_over, contribution("a"), errors.Fenced),
    (open_round, contribution("a", round=9), errors.WrongRound),
    (open_round, contribution("a", round=0), errors.WrongRound),
    (accept_a, contribution("a", sha256="other"), errors.Conflict),
    (accept_a_then_publish, contribution("a", sha256="other"), errors.Conflict),
    (freeze_last, contribution("a"), errors.StaleContribution),
    (publish_last, contribution("a"), errors.StaleContribution),
    (publish_last, contribution("c"), errors.StaleContribution),
    (plan_second, contribution("a", round=2), errors.WrongRound),
    (plan_second, contribution("c", round=2), errors.WrongRound),
    (open_round, contribution("c"), errors.LeaseLost),
    (open_round, contribution("a", norm=float("nan")), errors.StoreError),
    (open_round, contribution("a", loss_sum=float("inf")), errors.StoreError),
    (open_round, contribution("a", tokens=2**70), errors.StoreError),
]


@pytest.mark.parametrize(("move", "refused", "error"), REFUSALS)
def test_accept_refuses_with_the_first_rule_that_is_broken_and_changes_nothing(
    started: Ledger,
    move: Callable[[Ledger], None],
    refused: ContributionRecord,
    error: type[errors.AtollError],
):
    move(started)
    before = started.state_hash()

    with pytest.raises(errors.AtollError) as caught:
        alone(started).contributions.accept(refused)

    assert type(caught.value) is error
    assert started.state_hash() == before


def test_accept_of_one_contribution_from_two_threads_records_it_once(started: Ledger):
    both = Barrier(2)

    def send(receipt: str) -> ContributionRecord:
        both.wait()
        return alone(started).contributions.accept(contribution("a", receipt=receipt))

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(send, ["one", "two"])

    assert first == second
    assert alone(started).contributions.of_round(1) == [first]


def test_accept_racing_with_freeze_is_in_the_frozen_list_or_stale(started: Ledger):
    both = Barrier(2)

    def send() -> list[str]:
        both.wait()
        try:
            return [alone(started).contributions.accept(contribution("a")).worker_id]
        except errors.StaleContribution:
            return []

    def freeze() -> list[str]:
        both.wait()
        return [c.worker_id for c in ledgers.freeze(started, 1, None)]

    with ThreadPoolExecutor(2) as pool:
        sent, frozen = pool.submit(send), pool.submit(freeze)

    assert sent.result() == frozen.result()
    assert [c.worker_id for c in alone(started).contributions.of_round(1)] == frozen.result()
