"""Checkpoints of a sharded run: recorded whole or not at all, with restarts in between."""

import pytest

from atoll.errors import (
    StaleGroup,
)
from atoll.ledger.records import LeaseState, RoundState
from tests.hand_ranks import Sea, checkpoint, digest_at, restore_of
from tests.ledgers import alone


def test_checkpoint_is_recorded_in_one_transaction_with_what_it_holds(sea, trio):
    sea.trained(trio, 1)

    assert sea.settle() == 1
    record, found = alone(sea.ledger).rounds.all()[0], checkpoint(sea)
    assert (record.state, record.master_digest) == (RoundState.PUBLISHED, digest_at(sea, 6))
    assert (found.step, found.members) == (6, ("a", "b", "c"))
    assert (found.rows, found.tokens) == (30, 120)
    assert {x.state for x in alone(sea.ledger).leases.of_round(1)} == {LeaseState.DONE}
    assert {x.state for x in alone(sea.ledger).leases.of_round(2)} == {LeaseState.LEASED}
    assert [r.round for r in alone(sea.ledger).rounds.unpublished()] == [2, 3]
    assert trio[0].tell_part(1).committed
    assert sea.coordinator.version == 1
    shown = sea.coordinator.status()
    assert (shown.version, shown.digest, shown.checkpoint) == (1, digest_at(sea, 6), 6)
    assert (shown.history[0].train_loss, shown.history[0].evaluation_loss) == (2.0, 15.0 / 6)
    assert sea.audit().clean


@pytest.mark.parametrize("size", [1, 2, 4])
def test_digest_does_not_depend_on_the_number_of_ranks(tmp_path, size):
    sea = Sea(tmp_path, {"membership.min_workers": size})
    ranks = sea.formed(*sea.ranks(*"abcd"[:size]))
    sea.trained(ranks, 1)
    sea.settle()

    assert sea.coordinator.digest == digest_at(sea, 6)


def test_checkpoint_without_all_parts_is_not_recorded_and_its_rows_are_not_done(sea, trio):
    a, b, c = trio
    sea.trained(trio, 1, upload=False)
    for rank in (a, b):
        rank.hand_in(1)
    c.upload(1)  # and says nothing

    assert sea.settle() == 0
    assert {x.state for x in alone(sea.ledger).leases.of_round(1)} == {LeaseState.LEASED}
    assert sea.coordinator.version == 0


def test_restart_between_any_two_parts_loses_none(sea, trio):
    sea.trained(trio, 1, upload=False)
    for rank in trio:
        rank.upload(1)
        sea.restart()
        rank.tell_part(1)
        sea.restart()

    assert sea.settle() == 1
    assert sea.restart().coordinator.digest == digest_at(sea, 6)
    assert [rank.boundary(1).action for rank in trio] == ["go"] * 3
    assert sea.audit().clean


def test_new_group_uploads_the_checkpoint_that_a_death_kept_from_being_whole(sea, trio):
    """All had saved the round's last step, and one died before its part was in."""
    a, b, c = trio
    sea.trained(trio, 1, upload=False)
    a.hand_in(1)
    c.leave()

    found = restore_of(a, b)
    assert (found.step, found.source) == (6, "save")
    assert [i.round for i in a.formed.intervals] == [1, 2]
    for rank in (a, b):
        rank.save(6)
        rank.hand_in(1)

    assert sea.settle() == 1
    assert checkpoint(sea).members == ("a", "b")
    assert sea.coordinator.digest == digest_at(sea, 6)
    assert sea.audit().clean


def test_no_group_is_formed_between_the_last_part_and_the_record(sea, trio):
    """It would go back to before a checkpoint that is there the moment after."""
    a, b, c = trio
    sea.trained(trio, 1)
    c.leave()
    for rank in (a, b):
        rank.disk.clear()
        rank.ask()
    before = a.ask().action

    sea.settle()

    assert before == "wait"
    assert restore_of(a, b).source == "checkpoint"


def test_old_groups_part_changes_nothing(sea, trio):
    a, b, c = trio
    sea.trained(trio, 1, upload=False)
    old = c.formed
    b.leave()
    sea.formed(a, c)
    c.formed = old
    before = sea.state_hash()

    for call in (
        lambda: c.upload(1),
        lambda: c.tell_part(1),
        lambda: c.save(6),
        lambda: sea.coordinator.part_offset(c.request(1)),
    ):
        with pytest.raises(StaleGroup):
            call()

    assert sea.state_hash() == before
    assert sea.coordinator.checkpoints.uploads.in_flight() == frozenset()
