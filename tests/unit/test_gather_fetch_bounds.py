"""What a fetch never reads, and what found in a spool costs nobody but its peer."""

from pathlib import Path
from typing import Any

import pytest

from atoll.gather import publish
from atoll.gather.words import Reason
from tests.fetching import NBYTES, WINDOW, Manner, PlayedValidator
from tests.unit.test_gather_fetch import UIDS, World, reasons


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "spool")


def test_statement_that_is_too_long_is_refused_before_a_byte_of_it_is_read(world):
    key = publish.statement_key("peers/w3", WINDOW)
    world.bucket.objects[key] = b"{" * 50_000_000

    found = world.fetch()

    assert reasons(found) == {"w3": Reason.STATEMENT}
    assert key not in world.bucket.sent


def begun(world: World) -> World:
    """A life that ended in the middle of the first peer's object; the next one."""
    world.bucket.manners = {"w0": Manner(rate=1e5)}
    world.fetch(seconds=1.5, uids=["w0"])
    assert (world.home / "w0.part").exists()
    return world.restarted()


def test_check_that_breaks_on_spooled_bytes_skips_that_peer_alone(world):
    class Broken(PlayedValidator):
        def feed(self, piece: memoryview, /) -> None:
            if self._statement.uid == "w0":
                raise ZeroDivisionError
            super().feed(piece)

    found = begun(world).fetch(validator_of=Broken)

    assert reasons(found) == {"w0": Reason.FRAME}
    assert [one.uid for one in found.accepted] == UIDS[1:]


@pytest.mark.parametrize("mark", [NBYTES + 1, 2**63 - 1, 2**64 - 1])
def test_mark_beyond_the_end_of_a_part_is_not_believed(world, mark):
    again = begun(world)
    part = world.home / "w0.part"
    data = part.read_bytes()
    part.write_bytes(data[:NBYTES] + mark.to_bytes(8, "big"))

    found = again.fetch(uids=["w0"])

    assert [one.uid for one in found.accepted] == ["w0"]
    assert found.received_bytes == NBYTES


def test_call_that_gave_bytes_before_it_was_cut_gets_no_longer_the_next_time(world: Any):
    """Only a server that says nothing at all may take longer: a trickle is not let to."""
    world.bucket.manners = {"w0": Manner(rate=2e3)}
    until: list[float] = []
    pieces = world.bucket.pieces

    def seen(key: str, *rest: Any, deadline: float) -> Any:
        if "/frames/" in key:
            until.append(deadline - world.scheduler.now())
        return pieces(key, *rest, deadline=deadline)

    world.bucket.pieces = seen
    world.fetch(uids=["w0"], seconds=60.0)

    assert len(until) > 10 and max(until) <= 1.0 + 1e-9
