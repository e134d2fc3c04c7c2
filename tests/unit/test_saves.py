"""Saves on a rank's disk: what counts, what is checked, and what a crash leaves."""

import hashlib
import os

import pytest
import torch

from atoll import files as filesystem
from atoll.errors import BlobChanged, BlobMissing
from atoll.island.sharded import restore as restoring
from atoll.island.sharded.source import SaveSource, root_name
from atoll.layout import Layout, Span
from atoll.protocol.sharded import MAX_LATE, Restore
from atoll.strategies.sharded import saves
from atoll.strategies.sharded.holding import Holding
from atoll.strategies.sharded.saves import CHUNK_BYTES, NO_NOTES, Chunks, Notes, Saves

RUN = "run-1"
OWN = bytes(range(256)) * (CHUNK_BYTES // 128) + b"tail"  # two chunks and a bit
OTHER = b"other" * 1000


def reader_of(data, asked=None):
    def read(start, stop):
        if asked is not None:
            asked.append((start, stop))
        for at in range(start, stop, 300_000):
            yield data[at : min(at + 300_000, stop)]

    return read


def pair(kept, step, *, group=1, own=OWN, predecessor=OTHER, notes=NO_NOTES):
    draft = kept.begin(step, group=group, rank=2, notes=notes)
    draft.write_own([own])
    draft.finish_own()
    draft.write_predecessor(Chunks.of([predecessor]), reader_of(predecessor))
    return kept.complete(draft)


def steps(kept):
    return [held.step for held in kept.held]


@pytest.fixture
def kept(tmp_path):
    return Saves(tmp_path / "saves", run_id=RUN)


def test_root_is_the_hash_of_the_size_and_the_chunks_hashes():
    parts = [OWN[at : at + CHUNK_BYTES] for at in range(0, len(OWN), CHUNK_BYTES)]
    listed = b"".join(hashlib.sha256(part).digest() for part in parts)

    found = Chunks.of([OWN[:5], OWN[5:700_000], OWN[700_000:]])

    assert len(parts) == 3
    assert found.root == hashlib.sha256(len(OWN).to_bytes(8, "little") + listed).hexdigest()


@pytest.mark.parametrize(
    ("start", "stop"), [(0, len(OWN)), (10, 20), (CHUNK_BYTES - 3, 2 * CHUNK_BYTES + 2), (7, 7)]
)
def test_range_is_read_in_whole_chunks_and_no_more(start, stop):
    asked: list[tuple[int, int]] = []

    found = b"".join(Chunks.of([OWN]).read(reader_of(OWN, asked), start, stop))

    assert found == OWN[start:stop]
    assert all(a % CHUNK_BYTES == 0 and b - a < stop - start + 2 * CHUNK_BYTES for a, b in asked)


@pytest.mark.parametrize("flipped", [0, CHUNK_BYTES, len(OWN) - 1])
def test_flipped_byte_is_found_when_its_chunk_is_read(flipped):
    bad = bytearray(OWN)
    bad[flipped] ^= 1
    chunks = Chunks.of([OWN])

    with pytest.raises(BlobChanged, match=f"chunk {flipped // CHUNK_BYTES} "):
        list(chunks.read(reader_of(bytes(bad)), 0, len(OWN)))


def test_save_that_is_cut_off_is_found():
    with pytest.raises(BlobChanged, match="chunk 2 "):
        list(Chunks.of([OWN]).read(reader_of(OWN[:-1]), 0, len(OWN)))


def test_hashes_of_another_save_are_refused():
    with pytest.raises(BlobChanged):
        Chunks.of([OWN]).check_root(Chunks.of([OTHER]).root)
    with pytest.raises(BlobChanged):
        Chunks.decoded(Chunks.of([OWN]).encoded(), nbytes=len(OWN) + CHUNK_BYTES)


def test_complete_pair_is_found_by_its_roots_after_a_restart(kept, tmp_path):
    held = pair(kept, 10)

    again = Saves(tmp_path / "saves", run_id=RUN)

    assert again.held == (held,)
    assert (held.step, held.group, held.rank) == (10, 1, 2)
    assert b"".join(again.find(held.own).read(3, 9)) == OWN[3:9]
    assert b"".join(again.find(held.predecessor).read(0, len(OTHER))) == OTHER
    assert again.find(held.own).chunks().root == held.own


def half_own(draft):
    draft.write_own([OWN])


def half_finished(draft):
    draft.write_own([OWN])
    draft.finish_own()


def half_predecessor(draft):
    half_finished(draft)
    draft.write_predecessor(Chunks.of([OTHER]), reader_of(OTHER))


@pytest.mark.parametrize("half", [lambda _: None, half_own, half_finished, half_predecessor])
def test_half_written_pair_is_dropped_and_the_one_before_stays(kept, tmp_path, half):
    pair(kept, 10)
    half(kept.begin(20, group=1, rank=2))

    again = Saves(tmp_path / "saves", run_id=RUN)

    assert steps(again) == [10]
    assert [path.name for path in (tmp_path / "saves").iterdir()] == ["save-10-1"]


def test_pair_counts_only_once_its_bytes_are_synced(kept, monkeypatch):
    """That each of these syncs is needed, power cuts show (tests/faults/power)."""
    order = []
    real_sync, real_write = filesystem.sync, filesystem.write_whole

    def sync(path, **more):
        order.append(path.name)
        real_sync(path, **more)

    def write_whole(path, data, **more):
        order.append(path.name)
        real_write(path, data, **more)

    monkeypatch.setattr(filesystem, "sync", sync)
    monkeypatch.setattr(filesystem, "write_whole", write_whole)

    pair(kept, 10)

    vouching = order.index("complete.json")
    assert set(order[:vouching]) == {"own", "predecessor", "own.chunks", "predecessor.chunks"}
    assert order[-2:] == ["save-10-1", "saves"]


def test_removal_that_was_cut_off_counts_for_nothing(kept, tmp_path):
    pair(kept, 10)
    (tmp_path / "saves" / "save-10-1" / "own").unlink()

    assert Saves(tmp_path / "saves", run_id=RUN).held == ()


def test_saves_of_another_run_are_dropped(kept, tmp_path):
    pair(kept, 10)

    assert Saves(tmp_path / "saves", run_id="run-2").held == ()


def test_wrong_predecessor_is_refused_and_nothing_counts(kept):
    draft = kept.begin(10, group=1, rank=2)
    draft.write_own([OWN])
    draft.finish_own()

    with pytest.raises(BlobChanged):
        draft.write_predecessor(Chunks.of([OTHER]), reader_of(OTHER[:-1] + b"!"))

    assert kept.held == ()


def test_pairs_before_the_consistent_step_go_and_that_one_stays(kept):
    for step in (10, 20, 30, 40, 50):
        pair(kept, step)

    kept.keep(consistent=20, group=1)

    assert steps(kept) == [50, 40, 20]


def test_word_of_a_consistent_step_that_comes_late_leaves_a_later_groups_pairs(kept):
    for step, group in ((10, 1), (20, 1), (15, 2)):
        pair(kept, step, group=group)

    kept.keep(consistent=20, group=1)

    assert {(held.step, held.group) for held in kept.held} == {(20, 1), (15, 2)}


def test_pair_under_another_name_does_not_count(kept, tmp_path):
    """It could not be found again by its step and group."""
    pair(kept, 10)
    (found,) = tmp_path.rglob("save-10-1")
    found.rename(found.with_name("save-20-1"))

    assert Saves(found.parent, run_id=RUN).held == ()


def test_word_about_an_earlier_group_leaves_what_a_later_one_saved(kept):
    pair(kept, 4, group=1)
    pair(kept, 8, group=2)

    kept.keep(consistent=6, group=1)

    assert [(held.step, held.group) for held in kept.held] == [(8, 2)]


def test_steps_that_will_be_made_again_are_dropped(kept):
    for step in (10, 20):
        pair(kept, step)

    kept.went_back_to(10, group=1)

    assert steps(kept) == [10]


def test_shard_whose_bytes_were_wrong_is_discarded_with_its_pair(kept):
    held = pair(kept, 10)
    shard = kept.find(held.own)

    kept.discard(held.own)

    assert kept.held == ()
    with pytest.raises(BlobMissing):
        kept.find(held.own)
    with pytest.raises(BlobMissing):
        list(shard.read(0, 1))


@pytest.mark.parametrize("name", ["own", "predecessor"])
def test_shard_that_turns_out_damaged_while_another_reads_it_is_dropped(kept, tmp_path, name):
    good, bad = pair(kept, 10), pair(kept, 20, own=OWN[1:], predecessor=OTHER[1:])
    path = tmp_path / "saves" / "save-20-1" / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    offered = SaveSource(kept)

    with pytest.raises(BlobChanged):
        list(offered.read(root_name(getattr(bad, name)), 0, len(data)))

    assert kept.held == (good,)
    assert not path.exists()
    assert b"".join(offered.read(root_name(good.own), 5, 9)) == OWN[5:9]


def test_pair_of_one_rank_holds_its_own_twice(kept):
    held = pair(kept, 10, own=OTHER, predecessor=OTHER)

    assert held.own == held.predecessor == saves.Chunks.of([OTHER]).root


def test_open_shard_outlives_its_pair_and_is_let_go_with_its_last_reader(kept, monkeypatch):
    held = pair(kept, 3)
    closed: list[None] = []
    real = os.close
    monkeypatch.setattr(os, "close", lambda fd: closed.append(real(fd)))
    read = kept.find(held.own).opened().read
    kept.discard(held.own)
    closed.clear()  # a directory was gone through

    assert read(0, len(OWN)) == OWN
    assert closed == []
    del read
    assert closed == [None]


class Liar:
    """A rank that gives another save than the one it is asked for, with hashes that fit."""

    data = bytes(48)

    def read(self, _, name, start, stop):
        data = Chunks.of([self.data]).encoded() if name.endswith(".chunks") else self.data
        yield data[start:stop]


def test_save_that_its_holder_vouches_for_itself_is_not_restored(kept):
    root = Chunks.of([b"1" * 48]).root
    wanted = Restore(source="save", step=1, parts=(root,), holders=((1,),))
    put: list[object] = []

    with pytest.raises(BlobChanged, match=f"for save {root[:16]}"):
        restoring.restore(
            wanted,
            Holding((Span(0, 4),), 2, 0),
            lambda *given: put.append(given),
            peers=Liar(),  # type: ignore[arg-type]
            talk=None,  # type: ignore[arg-type]
            kept=kept,
            layout=Layout.of_tensors({"w": torch.zeros(4)}),
            initial_digest="0" * 64,
        )

    assert put == []


def test_notes_are_those_of_the_step_where_shards_do_not_change(kept, tmp_path):
    """A shard of frozen parameters has one root at every step."""
    notes = {
        step: Notes(0.1 * step, 8 * step, tuple((n, 1, 3) for n in range(1, step)))
        for step in (2, 4, 6)
    }
    for step, said in notes.items():
        held = pair(kept, step, notes=said)
    roots = ["0" * 64, held.own, held.predecessor]

    found = {step: kept.notes(step, roots) for step in notes}
    again = Saves(tmp_path / "saves", run_id=RUN)

    assert found == notes
    assert again.notes(4, roots) == notes[4]
    assert kept.notes(3, roots) is None
    assert kept.notes(4, roots[:2]) is None


def test_as_many_late_ranks_as_a_round_may_have_are_remembered(kept, tmp_path):
    notes = Notes(1.0, 8, tuple((10**9 + n, 1023, 1024) for n in range(MAX_LATE)))
    held = pair(kept, 2, notes=notes)

    again = Saves(tmp_path / "saves", run_id=RUN)

    assert again.notes(2, [held.own, held.predecessor]) == notes


def test_of_a_step_that_several_groups_saved_what_all_went_back_to_stays(kept):
    """Each of them died at the end of the same round, before its checkpoint was there."""
    made = [pair(kept, 10, group=group) for group in range(1, 6)]

    kept.keep(consistent=10, group=5)
    kept.went_back_to(10, group=0)
    assert len(kept.held) == 5  # the control: they pile up
    kept.went_back_to(10, group=3)

    assert kept.held == (made[2],)
