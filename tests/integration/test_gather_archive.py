"""What others may have left in an archive, and what a group puts there in spite of it."""

import threading
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from atoll.errors import FrameError, ObjectMissing, ProtocolError
from atoll.gather.download import Download
from atoll.gather.errand import Pace
from tests import gather_windows as windows
from tests.gather_late import Late, caught_up
from tests.gather_windows import World, same

UIDS = ("10", "7", "8", "9")


@pytest.fixture
def world(tmp_path) -> World:
    """One window."""
    made = World(tmp_path / "group")
    made.publish(*UIDS)
    made.run(1)
    return made


@pytest.mark.parametrize(
    "value", [b"1e999", b"-1e999", b"[" * 90_000 + b"]" * 90_000, b"9" * 5_000, b'"\\ud800"']
)
def test_forged_record_is_refused_by_name_whatever_stands_in_it(world, value):
    archive = windows.archive(world.bucket)
    stands = archive.document(0) or b""
    forged = stands.replace(b'"findings":{', b'"findings":{"a":' + value + b",", 1)
    assert len(forged) > len(stands)

    with pytest.raises(FrameError):
        archive.read(forged, 0)


def test_body_of_other_bytes_is_replaced_before_a_record_names_it(tmp_path):
    """Another of that name and size: nobody could ever apply the window."""
    first = World(tmp_path / "first")
    first.publish(*UIDS)
    first.run(1)
    recorded = windows.archive(first.bucket).find(0)
    assert recorded is not None
    made = recorded.artifact
    world = World(tmp_path / "second", prefix="archive")
    world.bucket.put(f"archive/bodies/{made.body_sha256}", bytes(made.body_bytes))
    world.publish(*UIDS)

    world.run(1)

    late = Late(tmp_path)
    caught_up(late, world.bucket)
    assert same(late.master, world.master)


def test_weights_of_another_size_are_replaced(world, tmp_path):
    archive, path = windows.archive(world.bucket), tmp_path / "weights"
    path.write_bytes(world.master.numpy().tobytes())
    world.bucket.put(f"archive/weights/{world.digest}", b"cut")

    archive.put_weights(world.digest, path)

    assert archive.has_weights(world.digest)


def test_artifact_that_nobody_could_read_is_never_recorded(world, tmp_path):
    archive = windows.archive(world.bucket, run_id="two words")
    found = windows.archive(world.bucket).find(0)
    assert found is not None
    made = replace(found.artifact, run_id="two words", window=1)

    with pytest.raises(FrameError, match="run_id"):
        archive.create(made, tmp_path / "none", windows.EMITTER)

    assert archive.windows() == [0]


def test_record_of_a_window_far_ahead_is_refused_at_once(world, tmp_path):
    world.bucket.put("archive/windows/999999999999999999.json", b"{}")

    with pytest.raises(ObjectMissing, match="see who writes to the archive"):
        caught_up(Late(tmp_path), world.bucket)


def test_ranks_that_wait_differently_are_different_plans(tmp_path):
    """How long an object may be missing decides who is in the window."""
    world = World(tmp_path)
    other = windows.terms(pace=Pace(turn_seconds=5.0, patience_seconds=7.0))

    found = world.run(2, terms_of=lambda rank: other if rank else windows.terms())

    assert all(isinstance(one, ProtocolError) for one in found)


def test_two_windows_of_nobody_in_a_row_do_not_share_a_file(tmp_path, monkeypatch):
    """Their bodies are equal, and one is removed while the next is on its way."""
    world = World(tmp_path / "group")
    for _ in range(3):
        world.run(1)
    removed, begun = threading.Event(), count()
    fetch, discard = Download.fetch, Download.discard

    def slow(self: Download, *rest: Any, **named: Any) -> None:
        if next(begun):
            assert removed.wait(20)
        fetch(self, *rest, **named)

    def told(self: Download) -> None:
        discard(self)
        removed.set()

    monkeypatch.setattr(Download, "fetch", slow)
    monkeypatch.setattr(Download, "discard", told)
    late = Late(tmp_path)

    found = caught_up(late, world.bucket)

    assert (found.applied, late.window, late.digest) == (3, 3, world.digest)
