"""An archive's server that is away while a window is recorded: asked again, or one name for all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.blobs.bucket import Bucket
from atoll.clock import ManualClock
from atoll.errors import ObjectRefused, StoreAway, StoreLate
from atoll.gather import retention
from tests import gather_windows as windows
from tests.gather_late import Late, caught_up
from tests.gather_windows import CLOCK, World, same

UIDS = ("10", "7", "8", "9")
SECONDS = 90.0  # as the command gives it to an archive with a window of 60
RANKS = 2


class Patient(ManualClock):
    """Passes only by waiting, and tells the waits; ahead of the buckets' own clock."""

    def __init__(self) -> None:
        super().__init__(CLOCK.now() + 3600)
        self.waits: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        super().sleep(seconds)


class Away:
    """A bucket whose calls of some names fail so often, each, before or after they were done."""

    def __init__(
        self,
        bucket: Bucket,
        *,
        often: float,
        names: tuple[str, ...] = ("put", "create", "look", "pieces"),
        error: Callable[[str], Exception] = StoreAway,
        is_done: bool = False,
    ) -> None:
        self._bucket, self._error, self._is_done = bucket, error, is_done
        self._left = dict.fromkeys(names, often)
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._bucket, name)

        def called(*given: Any, **named: Any) -> Any:
            self.calls.append(name)
            if self._left.get(name, 0) < 1:
                return call(*given, **named)
            self._left[name] -= 1
            if self._is_done:
                call(*given, **named)
            raise self._error(f"{name} was not answered")

        return called


def calm(home: Path) -> World:
    """A window that nothing happened to."""
    world = World(home)
    world.publish(*UIDS)
    world.run(RANKS)
    return world


def unrecorded(wanted: World) -> Bucket:
    """What its peers published, with the servers' times, and none of its archive."""
    for key in list(wanted.bucket.keys("archive")):
        wanted.bucket.remove(key)
    return wanted.bucket


def recorded(world: World, away: Away, clock: Patient, seconds: float = SECONDS) -> list[Any]:
    """What the ranks got of a window whose archive is `away` on rank 0, the only one to ask it."""
    return world.run(
        RANKS, archive_of=lambda _: away, archive_has={"clock": clock, "seconds": seconds}
    )


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("error", [StoreAway, StoreLate])
def test_window_whose_archive_is_away_for_some_attempts_has_the_same_bits(tmp_path, error, is_done):
    """Each of its calls fails three times; with `is_done` only its answer is lost."""
    wanted, world, clock = calm(tmp_path / "calm"), World(tmp_path / "world"), Patient()
    world.bucket = unrecorded(wanted)
    away = Away(world.bucket, often=3, error=error, is_done=is_done)

    found = recorded(world, away, clock)

    assert [one.uids for one in found] == [UIDS] * RANKS
    assert same(world.master, wanted.master) and world.prev == wanted.prev
    # Four calls (look, put, create, pieces) with three waits each, which grow.
    assert clock.waits == [0.1, 0.2, 0.4] * 4
    late = Late(tmp_path)
    caught_up(late, world.bucket)
    assert same(late.master, wanted.master)


def test_control_archive_without_patience_ends_the_window_at_the_first_error(tmp_path):
    world, clock = World(tmp_path), Patient()
    world.publish(*UIDS)
    before = world.master.clone()

    found = recorded(world, Away(world.bucket, often=1, names=("put",)), clock, seconds=0.05)

    assert [type(one) for one in found] == [StoreAway] * RANKS
    assert clock.waits == [] and same(world.master, before)


@pytest.mark.parametrize("name", ["put", "create"])
def test_archive_that_is_away_for_good_ends_the_window_by_name_on_all_ranks(tmp_path, name):
    wanted, world, clock = calm(tmp_path / "calm"), World(tmp_path / "world"), Patient()
    world.bucket = unrecorded(wanted)
    before, began = world.master.clone(), clock.now()
    away = Away(world.bucket, often=float("inf"), names=(name,))

    found = recorded(world, away, clock)

    assert [type(one) for one in found] == [StoreAway] * RANKS
    assert all(f"rank 0: {name} was not answered" in str(one) for one in found)
    # Nearly all of the time was used, and no more; never one attempt right after the other.
    assert SECONDS - 3 < clock.now() - began < SECONDS
    assert min(clock.waits) == 0.1 and len(clock.waits) == away.calls.count(name) - 1 < 60
    # Nothing is recorded and nobody has moved; the next life records the window.
    assert windows.archive(world.bucket).windows() == []
    assert (world.window, world.prev) == (0, "0" * 64) and same(world.master, before)
    world.run(RANKS)
    assert same(world.master, wanted.master) and world.prev == wanted.prev


def test_refusal_of_an_archives_server_is_not_asked_again(tmp_path):
    world, clock = World(tmp_path), Patient()
    world.publish(*UIDS)
    away = Away(world.bucket, often=1, names=("put",), error=ObjectRefused)

    found = recorded(world, away, clock)

    assert [type(one) for one in found] == [ObjectRefused] * RANKS
    assert clock.waits == [] and away.calls.count("put") == 1


def test_attempts_that_hang_leave_none_that_ends_too_late(tmp_path):
    """One that took 40 of 90 seconds is made once more, which may take as long, and not again."""
    world, clock = World(tmp_path), Patient()
    world.publish(*UIDS)

    def hangs(said: str) -> StoreLate:
        clock.advance(seconds=40.0)
        return StoreLate(said)

    began = clock.now()
    away = Away(world.bucket, often=float("inf"), names=("put",), error=hangs)

    found = recorded(world, away, clock)

    assert [type(one) for one in found] == [StoreLate] * RANKS
    assert away.calls.count("put") == 2 and clock.now() - began < SECONDS


def test_write_that_takes_long_and_goes_well_costs_no_patience(tmp_path):
    world, clock = World(tmp_path), Patient()
    world.publish(*UIDS)
    bucket = world.bucket

    class Slow(Away):
        def put(self, key: str, source: Path) -> Any:
            clock.advance(seconds=10 * SECONDS)
            return bucket.put(key, source)

    found = recorded(world, Slow(bucket, often=3, names=("create",)), clock)

    assert [one.uids for one in found] == [UIDS] * RANKS
    assert clock.waits == [0.1, 0.2, 0.4]


def test_whole_weights_and_retention_outlive_a_server_that_is_away_for_some_attempts(tmp_path):
    world, clock, path = World(tmp_path / "world"), Patient(), tmp_path / "weights"
    for _ in range(3):
        world.run(1)
    away = Away(world.bucket, often=2, names=("put", "keys", "remove"))
    archive = windows.archive(away, clock=clock, seconds=SECONDS)
    path.write_bytes(world.master.numpy().tobytes())

    archive.put_weights(world.digest, path)
    gone = retention.remove_old(archive, 1)

    assert gone == (0, 1) and windows.archive(world.bucket).windows() == [2]
    assert archive.has_weights(world.digest)
    assert clock.waits == [0.1, 0.2] * 3
