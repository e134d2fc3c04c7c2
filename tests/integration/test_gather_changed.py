"""Spooled bytes that change after they were validated, and stay what an encoder may write."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.errors import AtollError, StoreError
from atoll.gather import supports
from atoll.gather.partial import Accepted
from atoll.gather.reserves import Gather
from atoll.gather.spool import Spool, SpoolSlices
from atoll.gather.unchanged import Unchanged
from atoll.layout import Span
from tests import gather_windows as windows
from tests import gathers
from tests.gather_windows import LAYOUT, PRIMARIES, World, same

CODEC = supports.CODEC
FRONT = b"before the payload"


def change(path: Path, payload_start: int, *, after: int = 0) -> None:
    """Flips a bit of a payload, so that it is still one."""
    data = bytearray(path.read_bytes())
    payload_bytes = CODEC.encoded_bytes(LAYOUT.size)
    for place in range(payload_start + after, payload_start + payload_bytes):
        data[place] ^= 1
        payload = torch.frombuffer(data, dtype=torch.uint8)[payload_start:][:payload_bytes]
        try:
            CODEC.support(payload, LAYOUT.size)
        except AtollError:
            data[place] ^= 1
            continue
        path.write_bytes(data)
        return
    raise AssertionError("no byte of the payload can be another")


def changing(monkeypatch: pytest.MonkeyPatch, world: World, size: int, uid: str) -> None:
    """The disk of the rank that fetched `uid` changes a byte once all is merged."""
    gathered = Gather.run

    def run(self: Gather, *args: Any, **named: Any) -> Any:
        merged = gathered(self, *args, **named)
        [one] = [one for one in merged.accepted if one.uid == uid]
        if one.rank == self.ranks.rank:
            spool = world.home / "a" / f"{size}-{one.rank}" / "spool" / "00000000"
            change(spool / one.sha256, one.payload_start)
        return merged

    monkeypatch.setattr(Gather, "run", run)


@pytest.mark.parametrize("size", [1, 3])
def test_changed_object_is_applied_nowhere_and_fetched_anew(tmp_path, monkeypatch, size):
    world = World(tmp_path)
    world.publish(*PRIMARIES)
    expected = world.expected(PRIMARIES)
    with monkeypatch.context() as patched:
        changing(patched, world, size, "8")
        found = world.run(size)

    assert all(isinstance(one, StoreError) and "the object of '8'" in str(one) for one in found)
    assert same(world.moved, gathers.start()) and windows.archive(world.bucket).windows() == []
    world.run(size)
    assert world.window == 1 and same(world.master, expected)


def test_without_the_comparison_other_weights_would_be_recorded(tmp_path, monkeypatch):
    world = World(tmp_path)
    world.publish(*PRIMARIES)
    expected = world.expected(PRIMARIES)
    changing(monkeypatch, world, 2, "8")
    monkeypatch.setattr(Unchanged, "_stretches", lambda *_: [])
    monkeypatch.setattr(Unchanged, "_compare", lambda *_: None)

    world.run(2)

    assert windows.archive(world.bucket).windows() == [0] and not same(world.master, expected)


# One object, read while it changes

SPANS = (
    Span(0, LAYOUT.size // 2 // 4096 * 4096),
    Span(LAYOUT.size // 2 // 4096 * 4096, LAYOUT.size),
)
EDGE, END = (CODEC.encoded_bytes(span.stop) for span in SPANS)


@pytest.fixture
def spooled(tmp_path) -> tuple[Path, Accepted]:
    data = FRONT + gathers.payload(5) + bytes(32)
    sha256 = hashlib.sha256(data).hexdigest()
    path = tmp_path / sha256
    path.write_bytes(data)
    return path, Accepted("a", sha256, len(data), (1.0,), None, len(FRONT), 0)


def unchanged(path: Path, one: Accepted) -> Unchanged:
    slices = SpoolSlices(Spool(path.parent), {"a": (one.sha256, one.payload_start)})
    return Unchanged(slices, [one], [SPANS[0], Span(0, 0), SPANS[1]])


def test_object_is_read_by_runs_of_its_owners_in_turn(spooled):
    path, one = spooled
    source = unchanged(path, one)

    cuts = [(0, 82), (EDGE, EDGE + 164), (82, EDGE), (EDGE + 164, END)]
    parts = {cut: source.read("a", *cut) for cut in cuts}

    assert b"".join(parts[cut] for cut in sorted(cuts)) == gathers.payload(5)
    assert source.preamble("a") == FRONT


@pytest.mark.parametrize("after", [0, EDGE])
def test_change_between_two_reads_is_found_at_the_end_of_its_run(spooled, after):
    path, one = spooled
    source = unchanged(path, one)
    source.read("a", EDGE, EDGE + 82)
    change(path, one.payload_start, after=after + 82)
    last = (EDGE + 82, END) if after else (0, EDGE)

    with pytest.raises(StoreError, match="not what was validated"):
        source.read("a", *last)


def test_change_of_a_preamble_is_found(spooled):
    path, one = spooled
    source = unchanged(path, one)
    source.read("a", 0, 82)
    path.write_bytes(b"B" + path.read_bytes()[1:])

    with pytest.raises(StoreError, match="not what was validated"):
        source.preamble("a")


def test_object_that_grew_is_found(spooled):
    path, one = spooled
    path.write_bytes(path.read_bytes() + b"!")

    with pytest.raises(StoreError, match="not what was validated"):
        unchanged(path, one).read("a", 0, 82)
