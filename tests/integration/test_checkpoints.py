"""Saves, ends of rounds and checkpoints of a sharded run, with restarts in between."""

import hashlib
import threading
from dataclasses import replace

import pytest

from atoll.errors import (
    BlobMissing,
    Conflict,
    ContributionError,
    FrameError,
    FrameTooLarge,
    ProtocolError,
    StaleGroup,
    StateDamaged,
    StorageFull,
    WrongRound,
)
from atoll.layout import byte_view
from atoll.ledger import chain
from atoll.ledger.records import CheckpointRecord, LeaseState, RoundState
from atoll.ledger.tables.groups import CheckpointTable, SaveTable
from atoll.ledger.tables.leases import LeaseTable
from atoll.ledger.tables.rounds import RoundTable
from atoll.proof import retention
from atoll.protocol.messages import Identity
from atoll.protocol.sharded import SaveReport
from atoll.sums import digest as digests
from tests.clusters import tamper
from tests.hand_ranks import ROUND_STEPS, HandRank, Sea, initial, state_at
from tests.ledgers import alone


@pytest.fixture
def sea(tmp_path):
    made = Sea(tmp_path)
    yield made
    made.close()


@pytest.fixture
def trio(sea):
    return sea.formed(*sea.ranks("a", "b", "c"))


def restore_of(*ranks: HandRank):
    """What the group that `ranks` form goes back to."""
    found = ranks[0].sea.formed(*ranks)
    assert found[0].formed.restore is not None
    return found[0].formed.restore


def digest_at(sea: Sea, step: int) -> str:
    """Of the weights after a step, by the whole buffer: nothing here is streamed."""
    return digests.digest(sea.layout, state_at(sea.layout, step)[0]).root


def checkpoint(sea: Sea) -> CheckpointRecord:
    """The newest."""
    return alone(sea.ledger).checkpoints.all()[-1]


# Saves


def test_step_is_consistent_once_all_have_reported_it(trio):
    a, b, c = trio

    assert [a.save(3).consistent, b.save(3).consistent] == [0, 0]
    assert c.save(3).consistent == 3
    assert a.save(6).consistent == 3


def test_repeated_report_changes_nothing_and_another_hash_is_a_conflict(sea, trio):
    a, *_ = trio
    a.save(3)
    before = sea.state_hash()

    a.save(3)
    assert sea.state_hash() == before
    a.label = b"other"
    with pytest.raises(Conflict, match=r"rank 0 of group 3 saved step 3 as .* first one stands"):
        a.save(3)

    assert sea.state_hash() == before


def test_save_whose_predecessor_disagrees_is_not_consistent(trio):
    a, b, c = trio
    a.save(3)
    b.label = b"other"
    b.save(3)

    assert c.save(3).consistent == 0


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"step": 4}, WrongRound, "step=4 of the save is none that group 3 saves"),
        ({"step": 15}, WrongRound, "step=15 of the save is none"),
        ({"step": 0}, WrongRound, "step=0 of the save is none"),
        ({"rank": 1}, ProtocolError, "rank=1 of the save is not the sender's in group 3"),
        ({"group": 2}, StaleGroup, "group=2 is over or not begun, the present one is 3"),
    ],
)
def test_save_that_no_rank_makes_is_refused_and_changes_nothing(sea, trio, changes, error, says):
    a, *_ = trio
    before = sea.state_hash()
    save = a.held(3).model_copy(update=changes)

    with pytest.raises(error, match=says):
        sea.coordinator.saved(SaveReport(identity=a.identity, save=save))

    assert sea.state_hash() == before


def test_survivors_of_one_go_back_to_the_newest_consistent_step(sea, trio):
    a, b, c = trio
    for rank in trio:
        rank.save(3)
    a.save(6)  # the others had not
    b.leave()

    found = restore_of(a, c)

    assert (found.source, found.step, found.size) == ("save", 3, 3)
    assert found.holders == ((0,), (1,), (0, 1))  # b's is its successor's, c's also a's
    assert found.tokens == 3 * 5 * 4


def test_two_neighbours_gone_go_back_to_the_checkpoint(sea):
    a, b, c, d = sea.formed(*sea.ranks("a", "b", "c", "d"))
    ranks = [a, b, c, d]
    sea.trained(ranks, 1)
    sea.settle()
    for rank in ranks:
        rank.save(9)
    b.leave()
    c.leave()

    found = restore_of(a, d)

    assert (found.source, found.step, found.size) == ("checkpoint", 6, 4)
    assert found.parts == checkpoint(sea).blobs
    assert found.tokens == 6 * 5 * 4


def test_held_shard_with_another_hash_is_not_gone_back_to(sea, trio):
    for rank in trio:
        rank.save(3)
    trio[2].leave()
    [held] = trio[0].disk
    trio[0].disk = [held.model_copy(update={"predecessor": "f" * 64})]  # of the one that is gone

    [reply] = {rank.formed.restore for rank in sea.formed(*trio[:2])}

    assert reply.source == "initial"


def test_saves_that_a_group_went_back_behind_are_never_gone_back_to(sea):
    """Those who hold them come back after others trained the same steps to another checkpoint."""
    first = sea.formed(*sea.ranks("a", "b", "c", "d"))
    sea.trained(first, 1, upload=False)
    for rank in first:
        rank.leave()
    second = sea.formed(*sea.ranks("e", "f", "g"))
    for rank in second:
        rank.label = b"another history"
    sea.trained(second, 1)
    sea.settle()
    for rank in second[:2]:  # nobody else holds the shard of the first
        rank.leave()

    [reply] = {r.formed.restore for r in sea.formed(*(r.join() for r in first), second[2])}

    assert (reply.source, reply.step, reply.size) == ("checkpoint", 6, 3)


def test_without_anything_saved_all_begin_with_the_initial_weights(sea, trio):
    a, b, c = trio
    a.save(3)
    c.leave()

    found = restore_of(a, b)

    assert (found.source, found.step, found.tokens) == ("initial", 0, 0)
    assert found.parts == (sea.coordinator.run.initial_sha256,)
    reader = sea.coordinator.fetch(a.identity, found.parts[0], found.offset, sea.layout.nbytes)
    with reader:
        stored = reader.read(found.offset, sea.layout.nbytes)
    assert hashlib.sha256(stored).hexdigest() == hashlib.sha256(initial_bytes(sea)).hexdigest()


def initial_bytes(sea: Sea) -> bytes:
    return bytes(byte_view(initial(sea.layout)))


def test_save_is_forgotten_by_no_restart(sea, trio):
    a, b, c = trio
    a.save(3)
    sea.restart()
    b.save(3)
    sea.restart()

    assert c.save(3).consistent == 3
    c.leave()
    sea.restart()
    assert restore_of(a, b).step == 3


def test_checkpoint_that_all_hold_on_disk_is_read_rank_to_rank(sea, trio):
    a, b, c = trio
    sea.trained(trio, 1)
    sea.settle()
    c.leave()

    found = restore_of(a, b)

    assert (found.source, found.step) == ("save", 6)


# Ends of rounds


def test_boundary_goes_on_while_the_upload_is_under_way(sea, trio):
    sea.trained(trio, 1, upload=False)

    replies = [rank.boundary(1) for rank in trio]

    assert {r.action for r in replies} == {"go"}
    assert replies[0].interval is not None
    assert (replies[0].interval.round, replies[0].interval.first) == (2, 7)


def test_next_boundary_waits_until_the_round_before_is_committed(sea, trio):
    sea.trained(trio, 1)
    assert trio[0].boundary(1).action == "go"
    before = trio[0].boundary(2)

    assert sea.settle() == 1
    after = trio[0].boundary(2)

    assert before.action == "wait"
    assert (after.action, after.interval.round) == ("go", 3)


def test_newcomer_that_waits_at_the_first_asking_makes_all_regroup_after_the_commit(sea, trio):
    [d] = sea.ranks("d")
    d.ask()
    sea.trained(trio, 1, upload=False)
    first = trio[0].boundary(1)
    for rank in trio:
        rank.hand_in(1)
    assert sea.settle() == 1

    assert first.action == "wait"
    assert [rank.boundary(1).action for rank in trio] == ["regroup"] * 3
    assert trio[0].watch().group == 0
    found = restore_of(*trio, d)
    assert (found.step, found.source) == (6, "save")
    assert sea.group.step == 6


def test_newcomer_that_comes_after_the_first_asking_waits_for_the_next_boundary(sea, trio):
    a, b, c = trio
    sea.trained(trio, 1, upload=False)
    first = a.boundary(1)
    [d] = sea.ranks("d")
    d.ask()

    assert first.action == "go"
    assert [r.boundary(1).action for r in (b, c)] == ["go", "go"]


@pytest.mark.parametrize("newcomer_first", [True, False])
def test_what_the_first_was_told_at_a_boundary_all_are_told_after_a_restart(
    sea, trio, newcomer_first
):
    """The window between two ranks' asking: whoever waits then must not split the group."""
    a, b, c = trio
    sea.trained(trio, 1)
    sea.settle()
    if newcomer_first:
        [d] = sea.ranks("d")
        d.ask()
    told = a.boundary(1).action
    sea.restart()
    if not newcomer_first:
        [d] = sea.ranks("d")
        d.ask()

    assert told == ("regroup" if newcomer_first else "go")
    assert [r.boundary(1).action for r in (b, c)] == [told, told]


def test_group_that_is_over_is_told_to_regroup(sea, trio):
    a, _b, c = trio
    sea.trained(trio, 1)
    sea.settle()
    c.leave()

    assert a.boundary(1).action == "regroup"


def test_run_stops_at_its_last_round_after_the_commit(tmp_path):
    sea = Sea(tmp_path, {"stop.rounds": 1})
    ranks = sea.formed(*sea.ranks("a", "b"))
    assert [i.round for i in ranks[0].formed.intervals] == [1]
    sea.trained(ranks, 1, upload=False)
    before = ranks[0].boundary(1)
    for rank in ranks:
        rank.hand_in(1)

    assert before.action == "wait"
    assert not sea.coordinator.is_finished()
    assert sea.settle() == 1
    assert [rank.boundary(1).action for rank in ranks] == ["stop", "stop"]
    assert sea.coordinator.is_finished()
    assert (ranks[0].watch().action, ranks[0].watch().group) == ("train", ranks[0].number)
    assert ranks[0].join().ask().action == "stop"
    assert sea.audit().clean


def test_stop_in_tokens_ends_with_the_round_that_reaches_it(tmp_path):
    tokens = ROUND_STEPS * 5 * 4
    sea = Sea(tmp_path, {"stop": {"tokens": 2 * tokens}})
    ranks = sea.formed(*sea.ranks("a", "b"))
    for number in (1, 2):
        sea.trained(ranks, number)
        sea.settle()

    assert sea.coordinator.is_finished()
    assert sea.coordinator.status().tokens == 2 * tokens


def test_operators_stop_lets_the_round_be_committed(sea, trio):
    sea.coordinator.order("stop")
    sea.trained(trio, 1, upload=False)
    before = trio[0].boundary(1)
    for rank in trio:
        rank.hand_in(1)
    sea.settle()

    assert before.action == "wait"
    assert [rank.boundary(1).action for rank in trio] == ["stop"] * 3


def test_pause_holds_all_at_the_boundary(sea, trio):
    sea.trained(trio, 1)
    sea.settle()
    sea.coordinator.order("pause")
    held = trio[0].boundary(1)
    sea.coordinator.order("run")

    assert held.action == "wait"
    assert trio[0].boundary(1).action == "go"


def test_boundary_of_a_round_that_is_not_planned_is_refused(trio):
    with pytest.raises(WrongRound, match="round=3 of the boundary is not planned"):
        trio[0].boundary(3)


# Checkpoints


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


# Uploads of parts


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"group": 2}, StaleGroup, "group=2 is over"),
        ({"round": 2}, WrongRound, "round=2 of the part is not the one whose checkpoint comes"),
        ({"nbytes": 11}, FrameTooLarge, "nbytes=11 of the part of rank 0 in group 3"),
        ({"offset": 7}, FrameError, "offset=7 is not where an upload of this part stands"),
    ],
)
def test_part_that_is_not_wanted_is_refused_before_its_body(sea, trio, changes, error, says):
    with pytest.raises(error, match=says):
        sea.coordinator.begin_part(trio[0].request(1, **changes))

    assert list((sea.home / "blobs" / "tmp").iterdir()) == []


def test_broken_upload_resumes_where_it_was_and_the_older_stream_may_not_write(sea, trio):
    a, *_ = trio
    data, request = a.part(6), a.request(1)
    broken = sea.coordinator.begin_part(request)
    sea.coordinator.write_part(broken, data[:100])
    sea.ranks("d")  # a new generation in between

    assert sea.coordinator.part_offset(a.request(1)) == 100
    stream = sea.coordinator.begin_part(a.request(1, offset=100))
    with pytest.raises(FrameError, match="a later stream of this part has taken over"):
        sea.coordinator.write_part(broken, b"x")
    sea.coordinator.write_part(stream, data[100:])
    sea.coordinator.commit_part(stream)

    assert sea.coordinator.part_offset(a.request(1)) == len(data)
    assert sea.coordinator.begin_part(a.request(1)) is None
    assert sea.coordinator.checkpoints.uploads.in_flight() == {request.sha256}


def test_part_whose_group_ended_on_the_way_is_no_blob(sea, trio):
    sea.trained(trio, 1, upload=False)
    request = trio[0].request(1)
    stream = sea.coordinator.begin_part(request)
    sea.coordinator.write_part(stream, trio[0].part(6))
    trio[2].leave()

    with pytest.raises(StaleGroup):
        sea.coordinator.commit_part(stream)

    assert request.sha256 not in {ref.sha256 for ref in sea.blobs.stored()}
    assert sea.coordinator.checkpoints.uploads.in_flight() == frozenset()


def test_part_with_other_bytes_than_announced_is_dropped(sea, trio):
    a, *_ = trio
    data = bytearray(a.part(6))
    data[-1] ^= 1
    stream = sea.coordinator.begin_part(a.request(1))
    sea.coordinator.write_part(stream, bytes(data))

    with pytest.raises(FrameError, match="the part's sha256 is"):
        sea.coordinator.commit_part(stream)

    assert sea.coordinator.part_offset(a.request(1)) == 0
    a.save(6)
    with pytest.raises(BlobMissing, match="is not here; upload the part first"):
        a.tell_part(1)


def test_part_that_is_longer_than_announced_is_dropped(sea, trio):
    a, *_ = trio
    stream = sea.coordinator.begin_part(a.request(1))
    sea.coordinator.write_part(stream, a.part(6))

    with pytest.raises(FrameTooLarge, match="longer than the announced"):
        sea.coordinator.write_part(stream, b"x")

    assert list((sea.home / "blobs" / "tmp").iterdir()) == []


def test_part_of_a_step_that_does_not_end_the_round_is_refused(sea, trio):
    a, *_ = trio
    a.upload(1)
    before = sea.state_hash()

    with pytest.raises(WrongRound, match="step=3 of the part is not the last of round 1, 6"):
        a.tell_part(1, step=3)

    assert sea.state_hash() == before


# Ranges of blobs


def test_only_initial_weights_and_kept_checkpoints_can_be_fetched(sea, trio):
    a, *_ = trio
    a.upload(1)
    uploaded = a.request(1).sha256
    with pytest.raises(BlobMissing, match="neither the initial weights nor part of a checkpoint"):
        sea.coordinator.fetch(a.identity, uploaded, 0, 1)
    sea.trained(trio, 1)
    sea.settle()

    with sea.coordinator.fetch(a.identity, uploaded, 4, 8) as reader:
        assert reader.read(4, 8) == a.part(6)[4:12]
    with pytest.raises(ProtocolError, match="a range lies inside"):
        sea.coordinator.fetch(a.identity, uploaded, len(a.part(6)) - 3, 4)


def test_stranger_fetches_nothing(sea, trio):
    a, *_ = trio
    known = a.identity.model_dump()
    stranger = Identity(**{**known, "island_key": "9" * 64})

    with pytest.raises(Exception, match="belongs to another island key"):
        sea.coordinator.fetch(stranger, sea.coordinator.run.initial_sha256, 0, 1)


# What is kept, and what is proved


def test_retention_keeps_the_newest_checkpoints_and_drops_what_was_never_committed(tmp_path):
    sea = Sea(tmp_path, {"storage": {"retain": "snapshots", "keep_snapshots": 2}})
    a, b, c = ranks = sea.formed(*sea.ranks("a", "b", "c"))
    a.upload(1)
    left = a.request(1).sha256
    c.leave()
    ranks = sea.formed(a, b)
    for number in (1, 2, 3):
        sea.trained(ranks, number)
        assert sea.settle() == 1

    stored = {ref.sha256 for ref in sea.blobs.stored()}
    kept = alone(sea.ledger).checkpoints.all()
    assert stored == {
        sea.coordinator.run.initial_sha256,
        *kept[1].blobs,
        *kept[2].blobs,
    }
    assert left not in stored
    report = sea.audit()
    assert (report.clean, report.pruned, report.checkpoints_read) == (True, 2, 2)


def test_audit_finds_a_changed_blob_a_changed_record_and_rows_that_are_not_done(sea, trio):
    sea.trained(trio, 1)
    sea.settle()
    found = checkpoint(sea)
    assert sea.audit().clean

    tamper(sea.ledger, "checkpoints", {"round": 1}, tokens=121)
    assert "chain: hash" in {p.what for p in sea.audit().problems}
    tamper(sea.ledger, "checkpoints", {"round": 1}, tokens=120)
    tamper(sea.ledger, "leases", {"round": 1}, state="leased")
    assert {"rows"} <= {p.what for p in sea.audit().problems}
    tamper(sea.ledger, "leases", {"round": 1}, state="done")

    sea.restart()
    path = sea.home / "blobs" / found.blobs[1][:2] / found.blobs[1]
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(bytes(data))
    assert "blobs" in {p.what for p in sea.audit(with_replay=False).problems}


def forge(sea, **changes):
    """Changes the first checkpoint's record with a link of the chain that fits it."""
    tamper(sea.ledger, "checkpoints", {"round": 1}, **changes)
    [record, *_] = alone(sea.ledger).rounds.all()
    tamper(
        sea.ledger,
        "rounds",
        {"round": 1},
        hash=chain.checkpoint_hash(record, checkpoint(sea)),
    )


def test_audit_finds_what_a_chain_that_fits_does_not_show(sea, trio):
    sea.trained(trio, 1)
    sea.settle()

    forge(sea, step=5)
    assert "step" in {p.what for p in sea.audit().problems}
    forge(sea, step=6, rows=29)
    assert "rows" in {p.what for p in sea.audit().problems}
    forge(sea, rows=30)
    leaves = alone(sea.ledger).rounds.all()[0].leaves
    assert leaves is not None
    tamper(sea.ledger, "rounds", {"round": 1}, leaves=bytes(len(leaves)))
    assert "leaves" in {p.what for p in sea.audit(with_replay=False).problems}
    tamper(sea.ledger, "rounds", {"round": 1}, leaves=leaves)
    tamper(sea.ledger, "leases", {"round": 2}, state="done")
    assert (2, "rows") in {(p.round, p.what) for p in sea.audit().problems}


def test_chain_covers_the_hashes_of_saves_that_parts_were_uploaded_as(sea, trio):
    sea.trained(trio, 1)
    sea.settle()
    found = checkpoint(sea)
    [record, *_] = alone(sea.ledger).rounds.all()

    changed = replace(found, parts=(*found.parts[:-1], found.parts[0]))

    assert chain.checkpoint_hash(record, found) == record.hash
    assert chain.checkpoint_hash(record, changed) != record.hash


def test_parts_that_are_reported_survive_a_restart_and_what_prunes_after_it(sea, trio):
    """Only this life of the coordinator knows what it took in itself; the ledger knows the rest."""
    sea.trained(trio, 1, upload=False)
    for rank in trio[:2]:
        rank.hand_in(1)
    sea.restart()

    retention.prune(sea.ledger, sea.blobs, sea.manifest.storage)
    trio[2].hand_in(1)

    assert sea.settle() == 1
    assert sea.audit().clean


def test_audit_reads_the_weights_that_the_digest_is_of(sea, trio):
    """Parts whose names are right and whose order is not: only reading them finds it."""
    sea.trained(trio, 1)
    sea.settle()
    record = alone(sea.ledger).rounds.all()[0]
    other = digests.digest(sea.layout, state_at(sea.layout, 7)[0])
    found = checkpoint(sea)
    forged = replace(record, master_digest=other.root)
    tamper(
        sea.ledger,
        "rounds",
        {"round": 1},
        master_digest=other.root,
        leaves=other.leaves,
        hash=chain.checkpoint_hash(forged, found),
    )

    problems = {p.what: p.detail for p in sea.audit().problems}

    assert "tensor 'embedding' of the stored weights differs" in problems["weights"]
    assert "weights" not in {p.what for p in sea.audit(with_replay=False).problems}


def test_start_is_refused_when_a_part_of_the_newest_checkpoint_is_gone(sea, trio):
    sea.trained(trio, 1)
    sea.settle()
    gone = checkpoint(sea).blobs[1]
    (sea.home / "blobs" / gone[:2] / gone).unlink()

    with pytest.raises(StateDamaged, match=f"blob {gone} of the checkpoint of round 1"):
        sea.restart()


def test_report_that_crosses_the_commit_is_answered_as_committed(sea, trio, monkeypatch):
    """The checkpoint is recorded between two looks of the same report."""
    sea.trained(trio, 1)

    def settled(*_: object) -> bool:
        sea.settle()
        return True

    monkeypatch.setattr(sea.coordinator.checkpoints.uploads, "claims", settled)

    assert trio[0].tell_part(1).committed


def test_part_that_is_looked_at_again_wakes_nobody(sea, trio):
    """Else ranks that wait for the record of a whole checkpoint would keep waking each other."""
    sea.trained(trio, 1, upload=False)
    woken = []
    sea.coordinator.on_change(lambda: woken.append(True))
    for rank in trio:
        rank.hand_in(1)
    last = len(woken)

    for rank in trio:
        rank.tell_part(1)

    assert (last, len(woken)) == (1, 1)
    assert sea.settle() == 1


def test_disk_without_room_keeps_the_checkpoint_for_later(sea, trio, monkeypatch):
    sea.trained(trio, 1)
    whole = sea.coordinator.checkpoints.commit_due

    def full() -> bool:
        raise StorageFull

    monkeypatch.setattr(sea.coordinator.checkpoints, "commit_due", full)
    assert sea.settle() == 0
    assert sea.coordinator.status().storage_full
    monkeypatch.setattr(sea.coordinator.checkpoints, "commit_due", whole)
    sea.clock.advance(seconds=2.0)

    assert sea.settle() == 1


@pytest.mark.parametrize(
    ("table", "method"),
    [
        (SaveTable, "drop_below"),
        (LeaseTable, "finish"),
        (RoundTable, "checkpoint"),
        (CheckpointTable, "add"),
    ],
)
def test_crash_inside_the_commit_leaves_nothing_of_it(sea, trio, monkeypatch, table, method):
    """Whatever the transaction had done, the next start has all the parts and commits again."""
    sea.trained(trio, 1)
    before = sea.state_hash()
    with monkeypatch.context() as patch:
        patch.setattr(table, method, crash)
        with pytest.raises(Crash):
            sea.coordinator.advance()

    assert sea.state_hash() == before
    sea.restart()
    assert sea.settle() == 1
    assert sea.coordinator.digest == digest_at(sea, 6)
    assert sea.audit().clean


class Crash(Exception):
    """Ends what a coordinator is doing."""


def crash(*_: object, **__: object) -> None:
    raise Crash


# What a rank tells with its part


def test_part_that_is_not_the_senders_save_is_refused_and_changes_nothing(sea, trio):
    sea.trained(trio, 1, upload=False)
    a, b, _ = trio
    a.upload(1)
    before = sea.state_hash()

    with pytest.raises(ContributionError, match=r"part='ffff.* of 'a' is not its save of step 6"):
        a.tell_part(1, part="f" * 64)
    with pytest.raises(ContributionError, match="of 'a' is not its save of step 6"):
        a.tell_part(1, part=b.root(6))  # another's

    assert sea.state_hash() == before
    assert not a.tell_part(1).committed


def test_part_whose_save_was_not_reported_is_refused(sea, trio):
    a, *_ = trio
    a.save(3)
    a.upload(1)

    with pytest.raises(ContributionError, match=r"step 6, which was not reported; report the save"):
        a.tell_part(1)


@pytest.mark.parametrize("tokens", [119, 121])
def test_other_tokens_than_the_leased_rows_hold_are_refused(sea, trio, tokens):
    sea.trained(trio, 1, upload=False)
    a, *_ = trio
    a.upload(1)
    before = sea.state_hash()

    refusal = rf"tokens={tokens} of 'a' for round 1, .* hold 120"
    with pytest.raises(ContributionError, match=refusal):
        a.tell_part(1, tokens=tokens)

    assert sea.state_hash() == before
    a.tell_part(1, tokens=120)


# Parts that are stored already


def test_part_that_a_rank_was_told_is_stored_is_not_swept(sea, trio):
    """It came in with an earlier life of the coordinator, which did not live to hear of it."""
    sea.trained(trio, 1, upload=False)
    a, *_ = trio
    a.upload(1)
    sea.restart()
    request = a.request(1)

    assert sea.coordinator.part_offset(request) == request.nbytes
    sweep(sea)

    assert not a.tell_part(1).committed
    assert request.sha256 in {ref.sha256 for ref in sea.blobs.stored()}


def test_part_that_nobody_was_told_of_is_swept(sea, trio):
    sea.trained(trio, 1, upload=False)
    a, *_ = trio
    a.upload(1)
    sea.restart()
    sweep(sea)

    assert sea.coordinator.part_offset(a.request(1)) == 0
    assert sea.coordinator.checkpoints.uploads.in_flight() == frozenset()


def test_nobody_is_told_that_a_part_is_stored_while_it_is_being_swept(sea, trio):
    sea.trained(trio, 1, upload=False)
    a, *_ = trio
    a.upload(1)
    sea.restart()
    request, told = a.request(1), []
    asking = threading.Thread(target=lambda: told.append(sea.coordinator.part_offset(request)))
    with sea.coordinator.checkpoints.uploads.sweeping():
        asking.start()
        asking.join(0.1)
        assert told == []
        sea.blobs.delete(request.sha256)
    asking.join()

    assert told == [0]


def sweep(sea: Sea) -> None:
    """As after a checkpoint."""
    uploads = sea.coordinator.checkpoints.uploads
    with uploads.sweeping():
        retention.prune(sea.ledger, sea.blobs, sea.manifest.storage, in_flight=uploads.in_flight)
