"""A streaming island on links with a will of their own: what it computes depends on none of it."""

from pathlib import Path
from typing import Any

import pytest

from atoll.errors import FrameError
from tests.integration.test_resume_streaming import STREAMING
from tests.seas import Call, Sea

# Two steps a round, a tenth of a second each; up to two hand-ins are under way.
SETTINGS: dict[str, Any] = {
    **STREAMING,
    "sync_every": 4,
    "delay_steps": 3,
    "heartbeat_timeout": 1000.0,
}
LONGER_THAN_A_ROUND_SECONDS = 0.25


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> str:
    return Sea(tmp_path_factory.mktemp("calm"), **SETTINGS).run()


def late(sea: Sea, call: Call) -> Any:
    """The other side has it at once, and the answer takes its time."""
    found = call()
    sea.scheduler.sleep(2 * LONGER_THAN_A_ROUND_SECONDS)
    return found


def refused(_: Sea, __: Call) -> Any:
    raise FrameError("a frame that does not fit")


def slow(sea: Sea, call: Call) -> Any:
    sea.scheduler.sleep(LONGER_THAN_A_ROUND_SECONDS)
    return call()


def test_receipts_that_come_after_their_version_change_no_bit(tmp_path: Path, calm: str):
    """What is handed in behind a late receipt is encoded after the training has gone on."""
    sea = Sea(tmp_path, **SETTINGS)
    sea.faults = {("a", "upload", n): late for n in (2, 3, 4, 5)}

    assert sea.run() == calm


@pytest.mark.parametrize("count", [2, 3, 4])
def test_copy_that_is_fetched_whole_while_training_goes_on_changes_no_bit(tmp_path, calm, count):
    """Meanwhile no published copy is here, and a round is handed in."""
    sea = Sea(tmp_path, **SETTINGS)
    sea.faults = {("a", "download", count): refused, ("a", "download", count + 1): slow}

    assert sea.run() == calm
    assert sea.stale["a"] == 0
