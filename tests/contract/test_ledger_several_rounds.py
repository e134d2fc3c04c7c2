"""Several rounds unpublished at once, and contributions folded by another round than their own."""

from dataclasses import replace

import pytest

from atoll import errors
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import LeaseState, RoundState
from tests.ledgers import MANIFEST, PUBLISHED, RUN, alone, contribution, lease, plan


@pytest.fixture
def leading(ledger: Ledger) -> Ledger:
    """Rounds 1 and 2 open, with rows for `a` and `b` in each."""
    tables = alone(ledger)
    tables.run.create(RUN, MANIFEST)
    for name in "ab":
        tables.members.register(name, f"key {name}", wall=5.0)
    tables.rounds.begin(
        [
            plan(1, [lease(1, "a", 0, 8), lease(1, "b", 8, 16)]),
            replace(plan(2, [lease(2, "a", 16, 24), lease(2, "b", 24, 32)]), fragment=1, tokens=7),
        ]
    )
    return ledger


def states(ledger: Ledger) -> list[str]:
    return [record.state.value for record in alone(ledger).rounds.all()]


def test_first_rounds_are_begun_together_with_their_fragment_and_tokens(leading: Ledger):
    first, second = alone(leading).rounds.unpublished()

    assert (first.state, second.state) == (RoundState.OPEN, RoundState.OPEN)
    assert (first.fragment, first.tokens) == (0, 0)
    assert (second.fragment, second.tokens) == (1, 7)


def test_rounds_begun_together_must_follow_each_other(ledger: Ledger):
    alone(ledger).run.create(RUN, MANIFEST)

    with pytest.raises(errors.WrongRound, match="the next one is round 2"):
        alone(ledger).rounds.begin([plan(1, []), plan(3, [])])
    assert alone(ledger).rounds.all() == []


def test_freeze_ends_only_the_leases_that_are_named(leading: Ledger):
    alone(leading).rounds.freeze(1, plan(3, [lease(3, "a", 32, 40)]), ended=[(1, "a"), (2, "b")])

    found = {
        (le.round, le.worker_id): le.state
        for n in (1, 2)
        for le in alone(leading).leases.of_round(n)
    }
    assert found == {
        (1, "a"): LeaseState.REOPENED,
        (1, "b"): LeaseState.LEASED,
        (2, "a"): LeaseState.LEASED,
        (2, "b"): LeaseState.REOPENED,
    }
    assert states(leading) == ["frozen", "open", "planned"]


def test_planned_round_follows_the_latest_whichever_froze(leading: Ledger):
    with pytest.raises(errors.WrongRound, match="the next one is round 3"):
        alone(leading).rounds.freeze(1, plan(2, []), ended=())
    assert states(leading) == ["open", "open"]


def test_rounds_are_frozen_in_order(leading: Ledger):
    with pytest.raises(errors.WrongRound, match=r"round 1 is open; .* order of their numbers"):
        alone(leading).rounds.freeze(2, None, ended=())
    assert states(leading) == ["open", "open"]

    alone(leading).rounds.freeze(1, None, ended=())
    alone(leading).rounds.freeze(2, None, ended=())

    assert states(leading) == ["frozen", "frozen"]


def test_rounds_are_published_in_order_and_open_what_is_named(leading: Ledger):
    alone(leading).rounds.freeze(1, plan(3, []), ended=())
    alone(leading).rounds.freeze(2, plan(4, []), ended=())

    with pytest.raises(errors.WrongRound, match=r"round 1 is frozen; .* order of their numbers"):
        alone(leading).rounds.publish(2, PUBLISHED, opens=[3])
    alone(leading).rounds.publish(1, PUBLISHED, opens=[3])

    assert states(leading) == ["published", "frozen", "open", "planned"]
    assert [r.round for r in alone(leading).rounds.unpublished()] == [2, 3, 4]


def test_publishing_opens_only_a_planned_round(leading: Ledger):
    alone(leading).rounds.freeze(1, None, ended=())

    with pytest.raises(errors.WrongRound, match="only while it is planned"):
        alone(leading).rounds.publish(1, PUBLISHED, opens=[2])
    assert states(leading) == ["frozen", "open"]


def test_extend_and_expire_act_on_the_named_round(leading: Ledger):
    alone(leading).rounds.extend(replace(plan(1, [lease(1, "a", 32, 40)]), cursor=40))
    ended = alone(leading).rounds.expire(1, ["b"])

    assert ended == 1
    assert [le.state for le in alone(leading).leases.of_round(2)] == [LeaseState.LEASED] * 2
    assert [r.cursor for r in alone(leading).rounds.all()] == [40, 40]


def test_new_life_takes_over_all_leases_that_are_still_to_be_used(leading: Ledger):
    """Also of a round that is closed, where its freeze has left them."""
    alone(leading).rounds.freeze(1, plan(3, [lease(3, "a", 32, 40)]), ended=())

    alone(leading).members.register("a", "key a", wall=6.0)

    lives = [
        le.incarnation
        for number in (1, 2, 3)
        for le in alone(leading).leases.of_round(number)
        if le.worker_id == "a"
    ]
    assert lives == [2, 2, 2]


def test_lease_that_outlives_its_round_is_listed_and_can_expire(leading: Ledger):
    alone(leading).rounds.freeze(1, None, ended={(1, "b")})
    assert alone(leading).leases.outliving() == []
    alone(leading).rounds.publish(1, PUBLISHED)

    found = alone(leading).leases.outliving()
    ended = alone(leading).rounds.expire(1, ["a"])

    assert [(x.round, x.worker_id, x.state) for x in found] == [(1, "a", LeaseState.LEASED)]
    assert ended == 1
    assert alone(leading).leases.outliving() == []


def test_leases_that_are_added_say_how_many_tokens_there_were(leading: Ledger):
    alone(leading).rounds.extend(replace(plan(2, [lease(2, "a", 32, 40)]), cursor=40, tokens=77))

    assert [r.tokens for r in alone(leading).rounds.all()] == [0, 77]


# Contributions that another round folds


def test_contribution_is_found_by_the_round_that_folds_it_and_keyed_by_its_own(leading: Ledger):
    late = contribution("b", round=1, applied=2, sha256="late")
    mine = contribution("b", round=2, sha256="mine")
    other = contribution("a", round=2, sha256="other")
    for sent in (mine, other, late):
        alone(leading).contributions.accept(sent)

    tables = alone(leading)
    assert tables.contributions.of_round(1) == []
    assert tables.contributions.of_round(2) == [other, late, mine]  # by worker, then by round
    assert tables.contributions.get(1, "b") == late
    assert tables.contributions.blobs(first=2) == {"late", "mine", "other"}
    with leading.reading() as t:
        assert list(t.contributions.every()) == [other, late, mine]


def test_lease_of_the_round_it_was_made_for_is_done(leading: Ledger):
    alone(leading).contributions.accept(contribution("b", round=1, applied=2))

    done = [le.worker_id for le in alone(leading).leases.of_round(1) if le.state is LeaseState.DONE]
    assert done == ["b"]
    assert {le.state for le in alone(leading).leases.of_round(2)} == {LeaseState.LEASED}


def test_round_that_folds_must_be_open(leading: Ledger):
    alone(leading).rounds.freeze(1, plan(3, []), ended=())
    before = leading.state_hash()

    with pytest.raises(errors.StaleContribution, match="round 1 is frozen"):
        alone(leading).contributions.accept(contribution("a", round=1))
    with pytest.raises(errors.WrongRound, match="round 3 is only planned"):
        alone(leading).contributions.accept(contribution("a", round=1, applied=3))
    with pytest.raises(errors.WrongRound, match="round 4 is not in the ledger"):
        alone(leading).contributions.accept(contribution("a", round=1, applied=4))
    assert leading.state_hash() == before

    alone(leading).contributions.accept(contribution("a", round=1, applied=2))


def test_contribution_is_folded_once_whichever_round_is_named(leading: Ledger):
    first = alone(leading).contributions.accept(contribution("a", round=1))

    again = alone(leading).contributions.accept(contribution("a", round=1, applied=2))

    assert again == first
    assert alone(leading).contributions.of_round(2) == []


def test_tokens_count_with_the_round_that_folds_them(leading: Ledger):
    alone(leading).contributions.accept(contribution("a", round=1, applied=2, tokens=5))
    alone(leading).contributions.accept(contribution("b", round=1, tokens=3, loss_sum=0.5))

    alone(leading).rounds.freeze(1, None, ended=())

    assert alone(leading).contributions.counted_tokens() == 3
    totals = alone(leading).contributions.totals(first=1, last=2)
    assert {n: (t.contributions, t.tokens) for n, t in totals.items()} == {1: (1, 3), 2: (1, 5)}
