"""Old artifacts go, and a late joiner still gets to the newest weights."""

from dataclasses import replace
from typing import Any

import pytest

from atoll.blobs.bucket import Bucket
from atoll.errors import ConfigError, ObjectMissing
from atoll.gather import retention
from atoll.gather.retention import remove_old
from tests import gather_windows as windows
from tests.gather_late import Late, caught_up, copied
from tests.gather_windows import World, same

UIDS = ("10", "8")
STRAY = "archive/bodies/" + "e" * 64
FOREIGN = "archive/weights/README"


def put_whole(world: World) -> None:
    path = world.home / "weights"
    path.write_bytes(world.master.numpy().tobytes())
    windows.archive(world.bucket).put_weights(world.digest, path)


@pytest.fixture(scope="module")
def gathered(tmp_path_factory) -> World:
    """Five windows, one of nobody; whole weights after the first and the third."""
    world = World(tmp_path_factory.mktemp("group"))
    for window in range(5):
        world.publish(*(() if window == 1 else UIDS))
        world.run(1)
        if window in (0, 2):
            put_whole(world)
    world.bucket.put(STRAY, b"of a window that was never recorded")
    world.bucket.put(FOREIGN, b"not of the archive's making")
    return world


@pytest.fixture
def world(gathered: World) -> World:
    return replace(gathered, bucket=copied(gathered.bucket))


def names(bucket: Bucket, folder: str) -> set[str]:
    return {key.rpartition("/")[2] for key in bucket.keys(f"archive/{folder}")}


def left(bucket: Bucket) -> list[set[str]]:
    return [names(bucket, folder) for folder in ("windows", "bodies", "weights")]


@pytest.mark.parametrize(("keep", "gone"), [(1, (0, 1)), (3, (0, 1)), (4, (0,)), (5, ()), (9, ())])
def test_only_what_nobody_needs_goes_and_a_late_joiner_arrives(world, tmp_path, keep, gone):
    archive = windows.archive(world.bucket)

    assert remove_old(archive, keep) == gone

    late = Late(tmp_path)
    found = caught_up(late, world.bucket)
    assert archive.windows() == [k for k in range(5) if k not in gone]
    assert found.weights_after == (2 if gone else None)
    assert same(late.master, world.master) and late.prev == world.prev


def test_objects_that_no_record_names_go_and_others_stay(world):
    archive = windows.archive(world.bucket)
    remove_old(archive, 1)

    kept = [archive.find(window) for window in (2, 3, 4)]
    made = [one.artifact for one in kept if one is not None]
    assert left(world.bucket)[1] == {one.body_sha256 for one in made}
    assert left(world.bucket)[2] == {made[0].digest, "README"}
    assert remove_old(archive, 1) == ()


def test_without_whole_weights_nothing_goes(world):
    archive = windows.archive(world.bucket)
    for key in list(world.bucket.keys("archive/weights")):
        world.bucket.remove(key)
    before = left(world.bucket)

    assert remove_old(archive, 1) == ()
    assert left(world.bucket) == before


def test_removing_by_age_alone_would_leave_a_late_joiner_behind(world, tmp_path, monkeypatch):
    """The control: the rule about whole weights is what lets it arrive."""
    monkeypatch.setattr(retention, "_newest_whole", lambda *_: 99)
    remove_old(windows.archive(world.bucket), 1)

    with pytest.raises(ObjectMissing, match="window 0"):
        caught_up(Late(tmp_path), world.bucket)


@pytest.mark.parametrize("calls", range(4))
def test_broken_off_it_is_finished_by_the_next_one(world, tmp_path, calls):
    class Breaking:
        left = calls

        def __getattr__(self, name: str) -> Any:
            return getattr(world.bucket, name)

        def remove(self, key: str) -> None:
            if not self.left:
                raise RuntimeError("broken on purpose")
            self.left -= 1
            world.bucket.remove(key)

    with pytest.raises(RuntimeError):
        remove_old(windows.archive(Breaking()), 1)
    late = Late(tmp_path)
    caught_up(late, world.bucket)  # in between it can be done as well
    assert same(late.master, world.master)
    world.publish(*UIDS)
    world.run(1)
    put_whole(world)

    remove_old(windows.archive(world.bucket), 1)

    records, bodies, weights = left(world.bucket)
    assert records == {"00000005.json"}
    assert len(bodies) == 1 and weights == {world.digest, "README"}


def test_keeping_nothing_is_refused(world):
    with pytest.raises(ConfigError, match="keep_artifacts=0"):
        remove_old(windows.archive(world.bucket), 0)
