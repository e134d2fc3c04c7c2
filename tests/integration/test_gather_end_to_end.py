"""One window from published frames to moved weights and its artifact, at 1 to 4 ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.blobs.bucket import Bucket
from atoll.errors import AtollError, ConfigError, GroupBroken, MissingRanks, ProtocolError
from atoll.gather.words import Reason
from atoll.optim.nesterov import Nesterov
from tests import gather_windows as windows
from tests.gather_windows import World, same

TAKEN = ("10", "8", "9", "r1")


def published(home: Path) -> World:
    """`7` and the first reserve published nothing."""
    world = World(home)
    world.publish(*TAKEN)
    return world


class Breaking:
    """A bucket that breaks on this rank alone, not by an error that anybody named."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bucket, name)

    def look(self, key: str, *, deadline: float) -> Any:
        raise RuntimeError(f"broken on purpose: {key}")


def test_window_is_equal_at_1_to_4_ranks_and_to_the_reference(tmp_path):
    found, weights, records = [], [], []
    bucket = published(tmp_path).bucket  # one, for a server's times are part of the result
    for size in (1, 2, 3, 4):
        world = World(tmp_path / str(size), bucket, f"archive-{size}")
        found += world.run(size)
        weights.append(world.master)
        records.append(windows.archive(bucket, prefix=world.prefix).document(0))

    wanted = World(tmp_path).expected(TAKEN)
    assert all(same(one, wanted) for one in weights)
    assert all(one == found[0] and one.digest == found[0].digest for one in found)
    assert found[0].uids == TAKEN
    assert found[0].reasons == {"7": Reason.MISSING, "r0": Reason.MISSING}
    assert len(set(records)) == 1 and records[0] is not None


def test_another_peer_gives_other_weights(tmp_path):
    """The control of the test above: the reference tells sets apart."""
    world = published(tmp_path)
    wanted = world.expected((*TAKEN[:3], "r0"))

    world.run(1)

    assert not same(world.master, wanted)


def test_nobody_valid_is_an_empty_result_and_an_empty_artifact(tmp_path):
    world = World(tmp_path)
    before = world.master.clone()

    found = world.run(2)

    assert [one.uids for one in found] == [(), ()]
    assert found[0].success_rate == 0.0 and len(found[0].skipped) == 6
    assert same(world.master, before) and world.window == 1
    recorded = windows.archive(world.bucket).find(0)
    assert recorded is not None
    made = recorded.artifact
    assert (made.accepted, made.body_bytes, made.digest) == ((), 0, made.base_digest)


def test_ranks_with_different_plans_all_stop_and_name_them(tmp_path):
    world = published(tmp_path)
    before = world.master.clone()

    found = world.run(
        3, terms_of=lambda rank: windows.terms(weights={"10": 2} if rank == 1 else {})
    )

    assert all(isinstance(one, ProtocolError) and "rank 1" in str(one) for one in found)
    assert same(world.moved, before) and windows.archive(world.bucket).windows() == []


def test_rank_that_breaks_in_the_middle_stops_all_by_name(tmp_path):
    world = published(tmp_path)
    before = world.master.clone()

    found = world.run(
        3,
        buckets_of=lambda rank, bucket: Breaking(bucket) if rank == 1 else bucket,
    )

    assert all(isinstance(one, GroupBroken) for one in found), found
    assert all("rank 1" in str(one) and "RuntimeError" in str(one) for one in found)
    assert same(world.moved, before) and windows.archive(world.bucket).windows() == []


def test_rank_that_is_gone_is_named_by_all_others_within_the_deadline(tmp_path):
    world = published(tmp_path)

    started = windows.CLOCK.now()
    found = world.run(3, gone=1, timeout_seconds=1.0)

    assert [type(one) for one in found] == [MissingRanks, type(None), MissingRanks]
    assert all(one.ranks == (1,) for one in (found[0], found[2]))
    assert windows.CLOCK.now() - started < 10.0


def test_archive_that_fails_on_the_emitter_stops_all_by_name(tmp_path):
    world = published(tmp_path)

    class Full(Breaking):
        look = property(lambda self: self._bucket.look)

        def create(self, key: str, data: bytes) -> bool:
            raise OSError("no more objects")

    found = world.run(2, archive_of=Full)

    assert all(isinstance(one, AtollError) and "no more objects" in str(one) for one in found)
    assert windows.archive(world.bucket).windows() == []


def test_copy_is_left_out_and_named(tmp_path):
    world = World(tmp_path)
    world.publish("10", "8", "9")
    windows.put(world.bucket, "7", 0, world.digest, windows.payload("8", 0))
    wanted = world.expected(("10", "8", "9"))
    terms = windows.terms(settings=windows.settings(overlap_skip=True))

    found = world.run(2, terms_of=lambda _: terms)

    assert found[0].uids == ("10", "8", "9")
    assert found[0].reasons["7"] is Reason.COPY
    assert same(world.master, wanted)


def test_outer_optimizer_with_state_is_refused():
    with pytest.raises(ConfigError, match="takes sgd"):
        replace(windows.terms(), optimizer=Nesterov(lr=0.1, momentum=0.9))
