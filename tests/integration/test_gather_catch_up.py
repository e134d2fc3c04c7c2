"""Artifacts, restarted groups and late joiners: the same bits, or a refusal by name."""

from dataclasses import replace

import pytest

from atoll.collectives.base import Collectives
from atoll.errors import Conflict, FrameError, ObjectMissing, StateDamaged
from atoll.gather import artifact as artifacts
from atoll.gather.archive import Archive
from atoll.gather.artifact import Artifact
from atoll.gather.catch_up import CatchUp, Caught, Link, cheapest
from atoll.gather.keys import SecretKey
from atoll.gather.replica import Replica
from atoll.optim.sgd import Sgd
from tests import gather_windows as windows
from tests import gathers, rank_groups
from tests.gather_windows import LAYOUT, World, same

UIDS = ("10", "7", "8", "9")


@pytest.fixture
def world(tmp_path) -> World:
    """Three windows, the second one of nobody."""
    made = World(tmp_path / "group")
    for uids in (UIDS, (), UIDS[:3]):
        made.publish(*uids)
        made.run(2)
    return made


def newcomer() -> Replica:
    start = gathers.start()
    return Replica(master=start, window=0, digest=windows.root(start))


def caught_up(archive: Archive, replica: Replica, home, *, lr: float = gathers.LR) -> Caught:
    def work(ranks: Collectives) -> Caught:
        by = CatchUp(
            ranks=ranks,
            archive=archive,
            optimizer=Sgd(lr),
            memory_bytes=64 << 20,
            directory=home / "late",
        )
        return by.run(replica)

    [found] = rank_groups.threads(1, "direct", work, chunk_bytes=1 << 16)
    assert isinstance(found, Caught)
    return found


def made_of(archive: Archive, window: int) -> Artifact:
    found = archive.find(window)
    assert found is not None, window
    return found.artifact


def key_of(window: int) -> str:
    return f"archive/windows/{window:08d}.json"


def test_late_joiner_ends_in_the_same_bits(world, tmp_path):
    replica = newcomer()

    found = caught_up(windows.archive(world.bucket), replica, tmp_path)

    assert same(replica.master, world.master)
    assert (replica.window, replica.digest, replica.prev) == (3, world.digest, world.prev)
    assert (found.applied, found.weights_after) == (3, None)
    assert not (tmp_path / "late").exists()


def test_another_outer_lr_is_found_by_the_digest(world, tmp_path):
    replica = newcomer()

    with pytest.raises(StateDamaged, match="window 0"):
        caught_up(windows.archive(world.bucket), replica, tmp_path, lr=0.2)

    with pytest.raises(StateDamaged, match="load the weights"):
        replica.check(0)


def test_gap_is_refused_by_its_number(world, tmp_path):
    world.bucket.remove(key_of(1))
    replica = newcomer()

    with pytest.raises(ObjectMissing, match="window 1 has no record"):
        caught_up(windows.archive(world.bucket), replica, tmp_path)

    assert replica.window == 0 and same(replica.master, gathers.start())


def test_whole_weights_are_taken_behind_a_gap(world, tmp_path):
    archive = windows.archive(world.bucket)
    path = tmp_path / "weights"
    path.write_bytes(world.master.numpy().tobytes())
    archive.put_weights(world.digest, path)
    world.bucket.remove(key_of(1))
    replica = newcomer()

    found = caught_up(archive, replica, tmp_path)

    assert (found.weights_after, found.applied, found.bytes) == (2, 0, LAYOUT.nbytes)
    assert same(replica.master, world.master) and replica.prev == world.prev


def test_whole_weights_are_not_taken_where_they_are_more_bytes(world, tmp_path):
    archive = windows.archive(world.bucket)
    path = tmp_path / "weights"
    path.write_bytes(world.master.numpy().tobytes())
    archive.put_weights(world.digest, path)

    found = caught_up(archive, newcomer(), tmp_path)

    assert found.weights_after is None and found.bytes < LAYOUT.nbytes


def test_restarted_group_applies_the_artifact_it_finds(tmp_path):
    world = World(tmp_path)
    before = (world.master, world.window, world.prev)
    world.publish(*UIDS)
    first = world.run(2)
    after, prev = world.master, world.prev
    world.master, world.window, world.prev = before
    for uid in UIDS:
        world.bucket.remove(f"peers/{uid}/statements/00000000.json")

    again = world.run(3, life="b")

    assert same(world.master, after) and world.prev == prev
    assert all(one == first[0] for one in again)


def test_record_is_created_once(world, tmp_path):
    archive = windows.archive(world.bucket)
    stands = archive.document(1)
    other = replace(made_of(archive, 1), digest="e" * 64)

    with pytest.raises(Conflict, match="window 1"):
        archive.create(other, tmp_path / "none", windows.EMITTER)

    assert archive.document(1) == stands


def test_record_by_another_key_or_changed_is_refused(world):
    archive = windows.archive(world.bucket)
    made, stands = made_of(archive, 0), archive.document(0) or b""
    forged = artifacts.signed(made, SecretKey(bytes(32)))
    changed = stands.replace(b'"window":0', b'"window":1')

    for document in (forged, changed, stands + b" ", b"{}", stands[:-1]):
        with pytest.raises(FrameError):
            archive.read(document, 0)
    with pytest.raises(FrameError, match="window"):
        archive.read(stands, 1)


def test_changed_body_is_refused_before_it_is_applied(world, tmp_path):
    archive = windows.archive(world.bucket)
    made = made_of(archive, 0)
    key = f"archive/bodies/{made.body_sha256}"
    world.bucket.put(key, bytes(made.body_bytes))
    replica = newcomer()

    with pytest.raises(FrameError, match="sha256"):
        caught_up(archive, replica, tmp_path)

    assert same(replica.master, gathers.start()) and not replica.is_torn


def test_fork_is_refused(world, tmp_path):
    archive = windows.archive(world.bucket)
    made = replace(made_of(archive, 2), prev="f" * 64)
    world.bucket.put(key_of(2), artifacts.signed(made, windows.EMITTER))

    with pytest.raises(StateDamaged, match="window 2 does not follow"):
        caught_up(archive, newcomer(), tmp_path)


def test_whole_weights_are_chosen_by_their_bytes():
    links = [Link(k, "a", "b", "c", str(k), 40) for k in range(4)]

    def chosen(whole_bytes: int, *there: int, gaps: tuple[int, ...] = ()) -> int | None:
        found = cheapest(
            [link for link in links if link.window not in gaps],
            gaps,
            whole_bytes=whole_bytes,
            is_there=lambda link: link.window in there,
        )
        return None if found is None else found.window

    assert chosen(100, 1, 2) == 2  # 100 + 40 < 160
    assert chosen(100, 1) is None  # 100 + 80 > 160
    assert chosen(160, 3) is None and chosen(159, 3) == 3
    assert chosen(900, 1, 3, gaps=(2,)) == 3
    assert chosen(900, 1, gaps=(2,)) is None  # before the gap: of no use
