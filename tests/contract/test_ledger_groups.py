"""Rank groups, saves and checkpoints in every ledger."""

from dataclasses import replace

import pytest

from atoll.errors import Conflict, StoreError, WrongRound
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import (
    CheckpointRecord,
    GroupRecord,
    LeaseState,
    PartRecord,
    RankRecord,
    RoundState,
    SaveRecord,
)
from tests.ledgers import MANIFEST, PUBLISHED, RUN, alone, lease, plan

GROUP = GroupRecord(
    4, 1.5, (RankRecord(0, "b", 2, "10.0.0.1:1", "pem"), RankRecord(1, "a", 1, "10.0.0.2:1", "")), 6
)
PART = PartRecord(1, 4, 0, "a", "part", "blob", 12, 1.5, 8, 0.5, 2)
LATE = ((2, 1, 2), (6, 0, 2))
CHECKPOINT = CheckpointRecord(1, 6, 4, ("a",), ("part",), ("blob",), 8, 32, 1.5, LATE)


@pytest.fixture
def run(ledger: Ledger) -> Ledger:
    """Two rounds are open and leased to "a"."""
    alone(ledger).run.create(RUN, MANIFEST)
    for name in ("a", "b"):
        alone(ledger).members.register(name, f"key {name}", wall=0.0)
    alone(ledger).rounds.begin([plan(1, [lease(1, "a", 0, 16)]), plan(2, [lease(2, "a", 16, 32)])])
    return ledger


def test_group_comes_back_as_it_was_with_what_it_was_told(ledger: Ledger):
    alone(ledger).groups.form(GROUP)
    alone(ledger).groups.decide(4, round_number=3, goes_on=False)

    found = alone(ledger).groups.newest()

    assert found == replace(GROUP, decided=3, goes_on=False)
    assert alone(ledger).groups.get(4) == found


@pytest.mark.parametrize(("number", "is_over"), [(5, False), (4, True), (3, True)])
def test_group_follows_only_one_that_is_over_with_a_higher_number(ledger, number, is_over):
    alone(ledger).groups.form(replace(GROUP, is_over=is_over))

    with pytest.raises(StoreError, match=f"group {number} cannot follow group 4"):
        alone(ledger).groups.form(replace(GROUP, number=number))

    assert [g.number for g in alone(ledger).groups.all()] == [4]


def test_next_group_may_be_formed_once_the_one_before_is_over(ledger: Ledger):
    alone(ledger).groups.form(GROUP)
    alone(ledger).groups.end(4)

    alone(ledger).groups.form(replace(GROUP, number=7))

    assert [(g.number, g.is_over) for g in alone(ledger).groups.all()] == [(4, True), (7, False)]


def test_saves_come_newest_step_first_then_newest_group_then_by_rank(ledger: Ledger):
    keys = [(1, 3, 0), (1, 6, 1), (1, 6, 0), (2, 6, 0), (1, 9, 0)]
    for group, step, rank in keys:
        alone(ledger).saves.add(SaveRecord(group, step, rank, "own", "before"))

    found = [(s.group_number, s.step, s.rank) for s in alone(ledger).saves.since(6)]

    assert found == [(1, 9, 0), (2, 6, 0), (1, 6, 0), (1, 6, 1)]
    alone(ledger).saves.drop_below(9)
    assert len(alone(ledger).saves.since(0)) == 1


def test_first_save_and_the_first_part_of_a_rank_stand(run: Ledger):
    save = SaveRecord(1, 3, 0, "own", "before")
    alone(run).saves.add(save)
    alone(run).checkpoints.report(PART)
    before = run.state_hash()

    alone(run).saves.add(save)
    alone(run).checkpoints.report(replace(PART, loss_sum=9.0))
    with pytest.raises(Conflict):
        alone(run).saves.add(replace(save, own="other"))
    with pytest.raises(Conflict):
        alone(run).checkpoints.report(replace(PART, blob="other"))

    assert run.state_hash() == before


def test_leases_that_are_to_be_used_go_to_one_life_with_the_next_epoch(run: Ledger):
    alone(run).leases.finish(1, "a", 1)
    alone(run).leases.give_to("b", 5)

    found = {(x.round, x.worker_id, x.incarnation, x.lease_epoch, x.state) for x in every(run)}

    assert found == {(1, "a", 1, 1, LeaseState.DONE), (2, "b", 5, 2, LeaseState.LEASED)}


def every(ledger: Ledger):
    return [x for number in (1, 2) for x in alone(ledger).leases.of_round(number)]


def test_checkpoint_publishes_an_open_round_opens_the_planned_and_forgets_its_parts(run: Ledger):
    alone(run).checkpoints.report(PART)

    commit(run, 1)

    assert [r.state for r in alone(run).rounds.all()] == [
        RoundState.PUBLISHED,
        RoundState.OPEN,
        RoundState.OPEN,
    ]
    assert alone(run).checkpoints.newest() == CHECKPOINT == alone(run).checkpoints.get(1)
    assert alone(run).checkpoints.every_part() == []


def commit(ledger: Ledger, number: int) -> None:
    with ledger.writing() as t:
        t.checkpoints.add(replace(CHECKPOINT, round=number))
        t.rounds.checkpoint(number, PUBLISHED, plans=[plan(3, [lease(3, "a", 32, 48)])])


def test_checkpoint_out_of_order_changes_nothing(run: Ledger):
    before = run.state_hash()

    with pytest.raises(WrongRound, match="round 1 is open"):
        commit(run, 2)

    assert run.state_hash() == before


def test_tokens_are_those_of_all_checkpoints(run: Ledger):
    assert alone(run).checkpoints.tokens() == 0

    commit(run, 1)
    alone(run).checkpoints.add(replace(CHECKPOINT, round=2, tokens=2**40))

    assert alone(run).checkpoints.tokens() == 32 + 2**40


def test_lease_is_cut_into_pieces_that_are_leased_and_open_again(run: Ledger):
    whole = lease(1, "a", 0, 16)
    cuts = ((0, 3, "REOPENED"), (3, 9, "LEASED"), (9, 16, "REOPENED"))
    pieces = [
        replace(whole, start=start, stop=stop, unit=start, state=LeaseState[state])
        for start, stop, state in cuts
    ]

    alone(run).leases.split(whole, pieces)
    alone(run).leases.finish(1, "a", 1)

    found = [(x.start, x.stop, x.state.name) for x in alone(run).leases.of_round(1)]
    assert found == [(0, 3, "REOPENED"), (3, 9, "DONE"), (9, 16, "REOPENED")]
    assert [x.start for x in alone(run).leases.reopened()] == [0, 9]


def test_pieces_that_are_not_the_leases_rows_are_refused_and_change_nothing(run: Ledger):
    whole = lease(1, "a", 0, 16)
    first, last = replace(whole, stop=8), replace(whole, start=8)
    before = run.state_hash()

    for wrong in ([], [first], [last], [last, first], [first, replace(last, start=9)]):
        with pytest.raises(StoreError, match="each once, in order"):
            alone(run).leases.split(whole, wrong)
    with pytest.raises(StoreError, match="each once, in order"):
        alone(run).leases.split(whole, [first, replace(last, state=LeaseState.DONE)])
    with pytest.raises(StoreError, match="is not leased"):
        alone(run).leases.split(replace(whole, worker_id="b"), [replace(whole, worker_id="b")])

    assert run.state_hash() == before
