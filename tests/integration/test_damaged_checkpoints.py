"""A checkpoint of a sharded run that cannot be read: who goes on, who waits, and what is said."""

import pytest

from atoll.errors import BlobChanged, BlobMissing
from tests.hand_ranks import Sea
from tests.ledgers import alone


@pytest.fixture
def sea(tmp_path):
    made = Sea(tmp_path)
    yield made
    made.close()


@pytest.fixture
def pair(sea):
    """Two ranks that have recorded the checkpoint of step 6."""
    made = sea.formed(*sea.ranks("a", "b"))
    sea.trained(made, 1)
    assert sea.settle() == 1
    return made


def blob_of(sea):
    return alone(sea.ledger).checkpoints.all()[-1].blobs[1]


def file_of(sea, blob):
    [path] = sea.home.rglob(blob)
    return path


def turned(data):
    return data[:40] + bytes([data[40] ^ 1]) + data[41:]


def missing(path):
    path.unlink()


def changed(path):
    path.write_bytes(turned(path.read_bytes()))


def groups(sea):
    return len(alone(sea.ledger).groups.all())


def strangers(sea, pair):
    """Ranks without a save form a group that goes back to the checkpoint."""
    for rank in pair:
        rank.leave()
    made = sea.formed(*sea.ranks("c", "d"))
    assert made[0].formed.restore.source == "checkpoint"
    return made


@pytest.mark.parametrize(("damage", "error"), [(missing, BlobMissing), (changed, BlobChanged)])
def test_damaged_blob_is_named_and_no_group_is_formed_to_fail_on_it(sea, pair, damage, error):
    c, d = strangers(sea, pair)
    blob = blob_of(sea)
    kept = file_of(sea, blob).read_bytes()
    damage(file_of(sea, blob))

    with pytest.raises(error):
        sea.coordinator.fetch(c.identity, blob, 0, 4)
    c.join()
    before = groups(sea)
    replies = []
    for _ in range(8):
        sea.run_clock(c, d, seconds=5.0)
        replies += [c.ask(), d.ask()]

    assert {reply.action for reply in replies} == {"wait"}
    for word in (blob, "checkpoint of step 6", "`atoll repair`"):
        assert word in replies[-1].reason
        assert word in sea.coordinator.status().damaged
    assert groups(sea) == before
    assert "blobs" in {problem.what for problem in sea.audit(with_replay=False).problems}

    file_of_blob = next(sea.home.rglob(blob), None) or sea.home / "blobs" / blob[:2] / blob
    file_of_blob.write_bytes(kept)
    sea.run_clock(c, d, seconds=31.0)

    assert sea.coordinator.status().damaged == ""
    assert sea.formed(c, d)[0].formed.restore.source == "checkpoint"


def test_ranks_that_hold_the_step_go_on_from_their_disks(sea, pair):
    c, d = strangers(sea, pair)
    blob = blob_of(sea)
    missing(file_of(sea, blob))
    with pytest.raises(BlobMissing):
        sea.coordinator.fetch(c.identity, blob, 0, 4)
    c.leave()
    d.leave()

    found = sea.formed(*(rank.join() for rank in pair))[0].formed.restore

    assert (found.source, found.step) == ("save", 6)


def test_group_that_gives_up_before_its_first_save_has_the_checkpoint_looked_at(sea, pair):
    c, d = strangers(sea, pair)
    changed(file_of(sea, blob_of(sea)))

    c.join()  # what came was not what it should be, it says no more
    sea.settle()

    assert "checkpoint of step 6" in d.ask().reason
    assert d.ask().action == "wait"


def test_sound_checkpoint_of_a_group_that_gave_up_is_gone_back_to_again(sea, pair):
    c, d = strangers(sea, pair)

    c.join()
    sea.settle()

    assert sea.formed(c, d)[0].formed.restore.source == "checkpoint"
