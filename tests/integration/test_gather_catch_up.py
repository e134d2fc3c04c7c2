"""Artifacts, restarted groups and late joiners: the same bits, or a refusal by name."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.collectives.base import Collectives
from atoll.errors import (
    AtollError,
    ConfigError,
    Conflict,
    FrameError,
    GroupBroken,
    ObjectMissing,
    ProtocolError,
    StateDamaged,
    StoreAway,
)
from atoll.gather import artifact as artifacts
from atoll.gather.archive import Archive
from atoll.gather.artifact import Artifact
from atoll.gather.catch_up import CatchUp, owners
from atoll.gather.download import Download
from atoll.gather.keys import SecretKey
from atoll.gather.links import Link, Records, cheapest
from atoll.gather.replica import Replica
from atoll.optim.sgd import Sgd
from tests import gather_windows as windows
from tests import gathers, rank_groups
from tests.gather_late import STRETCH_BYTES, Counted, Late, caught_up, copied
from tests.gather_windows import LAYOUT, World, same

UIDS = ("10", "7", "8", "9")


@pytest.fixture(scope="module")
def gathered(tmp_path_factory) -> World:
    """Three windows, the second one of nobody."""
    made = World(tmp_path_factory.mktemp("group"))
    for uids in (UIDS, (), UIDS[:3]):
        made.publish(*uids)
        made.run(2)
    return made


@pytest.fixture
def world(gathered: World) -> World:
    """The same in a bucket that may be changed."""
    return replace(gathered, bucket=copied(gathered.bucket))


@pytest.fixture
def late(tmp_path) -> Late:
    return Late(tmp_path)


def made_of(archive: Archive, window: int) -> Artifact:
    found = archive.find(window)
    assert found is not None, window
    return found.artifact


def key_of(window: int) -> str:
    return f"archive/windows/{window:08d}.json"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_late_joiner_ends_in_the_same_bits_and_ranks_share_the_bodies(world, late, size):
    buckets = [Counted(world.bucket) for _ in range(size)]

    found = late.run(lambda rank: windows.archive(buckets[rank]), size=size)

    assert all(one == found[0] for one in found), found
    assert (found[0].applied, found[0].weights_after, found[0].stop) == (3, None, 3)
    assert same(late.master, world.master) and late.prev == world.prev
    assert {one.digest for one in late.replicas.values()} == {world.digest}
    assert sum(one.body_bytes for one in buckets) == found[0].bytes
    assert all(one.body_bytes for one in buckets)
    assert not (late.home / "late").exists()


def test_body_that_breaks_off_goes_on_at_its_offset(world, late):
    asked = 0

    def breaks(_: int) -> Exception | None:
        nonlocal asked
        asked += 1
        return StoreAway("broken on purpose") if asked % 3 == 0 else None

    bucket = Counted(world.bucket, breaks)

    [found] = late.run(lambda _: windows.archive(bucket))

    assert same(late.master, world.master)
    assert asked > 20 and bucket.body_bytes == found.bytes


def test_server_that_says_nothing_for_too_long_ends_it_on_all_ranks(world, late):
    bucket = Counted(world.bucket, lambda came: StoreAway("away") if came > 3_000 else None)

    found = late.run(lambda _: windows.archive(bucket, seconds=0.2), size=2)

    assert all(isinstance(one, StoreAway) for one in found), found
    assert late.window == 0 and not any(one.is_torn for one in late.replicas.values())


@pytest.mark.parametrize(
    ("size", "after", "saved"), [(1, 1, 0), (2, 7_000, 0), (2, 30_000, 2), (3, 38_000, 2)]
)
def test_killed_catch_up_goes_on_at_its_last_window_and_byte(world, late, size, after, saved):
    """As after a kill: nothing is cleaned up, and only what was applied is saved."""

    def breaks(_: int) -> Exception | None:
        return RuntimeError("killed") if sum(one.body_bytes for one in buckets) >= after else None

    buckets = [Counted(world.bucket, breaks) for _ in range(size)]
    broken = late.run(lambda rank: windows.archive(buckets[rank]), size=size)
    assert all(isinstance(one, GroupBroken) and "killed" in str(one) for one in broken), broken
    assert late.window == saved
    came = sum(one.body_bytes for one in buckets)
    rest = [Counted(world.bucket) for _ in range(2)]

    again = late.run(lambda rank: windows.archive(rest[rank]), size=2)

    bodies = sum(made_of(windows.archive(world.bucket), k).body_bytes for k in range(3))
    assert came + sum(one.body_bytes for one in rest) == bodies
    assert (again[0].first, again[0].applied) == (saved, 3 - saved)
    assert same(late.master, world.master) and late.prev == world.prev


def test_bytes_of_an_earlier_life_that_prove_wrong_are_fetched_anew(world, late):
    bucket = Counted(world.bucket, lambda came: RuntimeError("killed") if came > 9_000 else None)
    late.run(lambda _: windows.archive(bucket))
    made = made_of(windows.archive(world.bucket), 0)
    path = late.home / "late" / made.body_sha256
    data = bytearray(path.read_bytes())
    data[3_456] ^= 1
    path.write_bytes(data)

    caught_up(late, world.bucket, size=2)

    assert same(late.master, world.master)


def test_memory_that_is_too_small_is_refused_with_the_number_that_is_enough(world, late):
    with pytest.raises(ConfigError, match="at least"):
        caught_up(late, world.bucket, memory_bytes=3 << 20, size=2)

    assert late.window == 0 and not any(one.is_torn for one in late.replicas.values())


def test_another_outer_lr_is_found_by_the_digest(world, late):
    with pytest.raises(StateDamaged, match="window 0"):
        caught_up(late, world.bucket, lr=0.2)

    with pytest.raises(StateDamaged, match="load the weights"):
        late.replicas[0].check(0)


def test_gap_is_refused_by_its_number(world, late):
    world.bucket.remove(key_of(1))

    with pytest.raises(ObjectMissing, match="window 1 has no record"):
        caught_up(late, world.bucket, size=2)

    assert late.window == 0 and same(late.master, gathers.start())


def put_whole(world: World, home: Path) -> None:
    path = home / "weights"
    path.write_bytes(world.master.numpy().tobytes())
    windows.archive(world.bucket).put_weights(world.digest, path)


@pytest.mark.parametrize("size", [1, 3])
def test_whole_weights_are_taken_behind_a_gap(world, late, size):
    put_whole(world, late.home)
    world.bucket.remove(key_of(1))

    found = caught_up(late, world.bucket, size=size)

    assert (found.weights_after, found.applied, found.bytes) == (2, 0, LAYOUT.nbytes)
    assert same(late.master, world.master) and late.prev == world.prev


def test_whole_weights_of_another_digest_are_refused(world, late):
    put_whole(world, late.home)
    world.bucket.remove(key_of(1))
    key = f"archive/weights/{world.digest}"
    world.bucket.put(key, bytes(LAYOUT.nbytes))

    with pytest.raises(FrameError, match="another digest"):
        caught_up(late, world.bucket, size=2)

    assert late.window == 0


def test_whole_weights_of_an_earlier_life_that_prove_wrong_are_fetched_anew(world, late):
    put_whole(world, late.home)
    world.bucket.remove(key_of(1))
    archive = windows.archive(world.bucket)
    (late.home / "late").mkdir()
    path = late.home / "late" / world.digest
    earlier = Download(path, archive.weights_key(world.digest), LAYOUT.nbytes, STRETCH_BYTES)
    earlier.prepare()
    earlier.fetch(archive, rank=0, ranks=1, is_wanted=lambda: True)
    data = bytearray(path.read_bytes())
    data[3_456] ^= 1
    path.write_bytes(data)

    found = caught_up(late, world.bucket, size=2)

    assert found.weights_after == 2 and same(late.master, world.master)


def test_whole_weights_are_not_taken_where_they_are_more_bytes(world, late):
    put_whole(world, late.home)

    found = caught_up(late, world.bucket)

    assert found.weights_after is None and found.bytes < LAYOUT.nbytes


def test_restarted_group_applies_the_artifact_it_finds(tmp_path, caplog):
    world = World(tmp_path)
    before = (world.master, world.window, world.prev)
    world.publish(*UIDS)
    first = world.run(2)
    after, prev = world.master, world.prev
    world.master, world.window, world.prev = before
    for uid in UIDS:
        world.bucket.remove(f"peers/{uid}/statements/00000000.json")

    with caplog.at_level(logging.INFO, "atoll.gather.events"):
        again = world.run(3, life="b")

    [event] = caplog.records
    assert (event.message, event.__dict__["window"]) == ("window replayed", 0)
    assert event.__dict__["uids"] == list(UIDS)
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


def test_changed_body_is_refused_before_it_is_applied(world, late):
    made = made_of(windows.archive(world.bucket), 0)
    world.bucket.put(f"archive/bodies/{made.body_sha256}", bytes(made.body_bytes))

    with pytest.raises(FrameError, match="did not sign"):
        caught_up(late, world.bucket, size=2)

    assert late.window == 0 and not any(one.is_torn for one in late.replicas.values())


def test_fork_is_refused(world, late):
    archive = windows.archive(world.bucket)
    made = replace(made_of(archive, 2), prev="f" * 64)
    world.bucket.put(key_of(2), artifacts.signed(made, windows.EMITTER))

    with pytest.raises(StateDamaged, match="window 2 does not follow"):
        caught_up(late, world.bucket)


def test_record_on_disk_that_became_another_is_refused(world, late):
    """Signed as it should be, and not the one whose chain was checked."""
    archive = windows.archive(world.bucket)
    records = Records(archive, late.home)
    link = records.way(0, None).links[1]
    assert records.read(1, link.sha256).sha256 == link.sha256
    other = replace(made_of(archive, 1), primaries=("10", "7"))
    (late.home / "00000001.json").write_bytes(artifacts.signed(other, windows.EMITTER))

    with pytest.raises(StateDamaged, match="changed since"):
        records.read(1, link.sha256)


@pytest.mark.parametrize("changed", ["window", "digest", "prev", "stop", "manifest_sha256"])
def test_ranks_that_stand_elsewhere_do_not_catch_up(world, late, changed):
    """One rank's weights, chain, aim or run are others: found before a record is read."""
    read: list[str] = []

    class Watched(Archive):
        def document(self, window: int) -> bytes | None:
            read.append(str(window))
            return super().document(window)

    def work(ranks: Collectives) -> Any:
        told: dict[str, Any] = {"window": 0, "digest": late.digest, "prev": late.prev}
        told |= {"stop": 3, "manifest_sha256": windows.MANIFEST}
        if ranks.rank:
            told[changed] = {"window": 1, "stop": 2}.get(changed, "d" * 64)
        stop, manifest = told.pop("stop"), told.pop("manifest_sha256")
        own = owners(LAYOUT, 2)[ranks.rank]
        stored = windows.archive(world.bucket, manifest_sha256=manifest)
        by = CatchUp(
            ranks=ranks,
            archive=Watched(**vars(stored)),
            optimizer=Sgd(gathers.LR),
            trust=windows.terms().trust,
            memory_bytes=64 << 20,
            directory=late.home / "late",
        )
        try:
            return by.run(Replica(master=own.of(gathers.start()), **told), stop=stop)
        except AtollError as exc:
            return exc

    found = rank_groups.threads(2, "direct", work, chunk_bytes=1 << 16)

    assert all(isinstance(one, ProtocolError) and "different plans" in str(one) for one in found)
    assert read == []


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
