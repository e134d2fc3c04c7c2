"""`kill -9` of coordinator and islands while fragments are in flight: the bits of a calm run.

Two fragments, merged four steps after a hand-in where a round has three: so at any moment up to
two hand-ins of an island are without a receipt, and its own weights hold rows that no published
version has. A killed island goes on from its state directory as if it had paused.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import lives
from tests.lives import CLOCK, History, Lives, Place

pytestmark = [pytest.mark.xdist_group("streaming-killed"), pytest.mark.timeout(300)]

ISLANDS = ("island-0", "island-1")
COORDINATOR = "coordinator"
ROUNDS = 24
STREAMING = """mode = "streaming"
sync_every = 6
num_fragments = 2
delay_steps = 4
local_weight = 0.25"""
# Who is killed from which version on; each starts again at once.
KILLS = (
    (2, "island-0"),
    (5, COORDINATOR),
    (8, "island-1"),
    (11, "island-0"),
    (14, COORDINATOR),
    (17, "island-1"),
)


@dataclass(frozen=True)
class Survived:
    """What a run came to."""

    history: History
    audit: dict[str, Any]
    logs: str  # of the islands


def survive(home: Path, kills: Sequence[tuple[int, str]]) -> Survived:
    file = lives.run_file(
        home / "run.toml", Place(), rounds=ROUNDS, min_workers=len(ISLANDS), retain="all"
    )
    file.write_text(file.read_text().replace("sync_every = 6", STREAMING))
    moments = random.Random(1)
    with Lives(home, file) as run:
        run.serve()
        for name in ISLANDS:
            run.join(name)
        for version, victim in kills:
            reach(run, version)
            CLOCK.sleep(moments.uniform(0.0, 0.2))  # a random moment, not synchronisation
            run.living[victim].kill()
            run.serve() if victim == COORDINATOR else run.join(victim)
        run.finish()
        logs = "".join((home / f"{name}.log").read_text() for name in ISLANDS)
        return Survived(run.history(), run.audit(), logs)


def reach(run: Lives, version: int) -> None:
    """Returns once that version is published."""
    wanted = f"round={version} "
    deadline = CLOCK.now() + 60
    while not any(
        "round closed" in x and wanted in x + " " for x in run.living[COORDINATOR].log.fresh()
    ):
        assert CLOCK.now() < deadline, f"version {version} is not published"
        CLOCK.sleep(lives.POLL_SECONDS)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Survived:
    return survive(tmp_path_factory.mktemp("calm"), ())


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Survived:
    return survive(tmp_path_factory.mktemp("killed"), KILLS)


def test_killed_streaming_run_has_the_digests_of_a_calm_one(killed, calm):
    assert killed.history.digests == calm.history.digests
    assert killed.history.counted() == calm.history.counted()


def test_every_row_of_a_killed_streaming_run_is_in_every_fragment_once(killed):
    rows = killed.audit["rows"]

    assert (killed.audit["exit_code"], killed.audit["problems"]) == (0, [])
    assert killed.audit["replayed_rounds"] == ROUNDS
    assert [(f["counted"], f["missed"], f["to_come"]) for f in killed.audit["fragments"]] == [
        (rows, 0, 0),
        (rows, 0, 0),
    ]
