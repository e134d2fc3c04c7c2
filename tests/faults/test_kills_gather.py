"""`kill -9` of coordinator and islands of a gather run over a real S3 server, at random moments.

Where all islands are in every round, its bits are those of a run that nobody killed.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import lives, servers
from tests.faults.test_kills import COORDINATOR, Storm, schedule
from tests.lives import History, Lives, Place
from tests.processes import KILLED
from tests.servers import RunningServer

KILLS = max(1, int(os.environ.get("ATOLL_STORM_KILLS", "2")) // 2)  # of each kind
ROUNDS = 8 + 4 * KILLS
ISLANDS = ("island-0", "island-1", "island-2")
MORE = f"""
strategy = "gather"

[outer]
optimizer = "sgd"
lr = 1.0

[gather.buckets.main]
url = "s3://{servers.BUCKET}"
"""

pytestmark = [pytest.mark.storm, pytest.mark.s3, pytest.mark.timeout(240 + 40 * KILLS)]


@dataclass(frozen=True)
class Survived:
    """What a run came to."""

    storm: Storm
    history: History
    audit: dict[str, Any]


def survive(home: Path, server: RunningServer, *, kills: int) -> Survived:
    """A whole run with so many kills of the coordinator, and of islands."""
    place = Place(s3=lives.s3_access(server))
    file = lives.run_file(
        *(home / "run.toml", place),
        rounds=ROUNDS,
        min_workers=len(ISLANDS),
        retain="all",
        more=MORE,
        codecs=("topk", "fp32"),
    )
    with Lives(home, file, place) as run:
        run.serve()
        for island in ISLANDS:
            run.join(island)
        storm = Storm(run)
        for kill in schedule(5, coordinator=kills, islands=kills, until=ROUNDS - 6):
            storm.strike(kill)
        run.finish_all()
        return Survived(storm, run.history(), run.audit())


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, s3_server: RunningServer) -> Survived:
    return survive(tmp_path_factory.mktemp("gather-kills"), s3_server, kills=KILLS)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, s3_server: RunningServer) -> Survived:
    return survive(tmp_path_factory.mktemp("gather-calm"), s3_server, kills=0)


def test_run_under_kills_completes_and_replays_clean(killed: Survived) -> None:
    found, audit = killed.storm.exit_codes, killed.audit
    print(f"{dict(found)}, the ledger after a kill: {dict(killed.storm.hit)}")

    assert found == {(COORDINATOR, KILLED): KILLS, ("island", KILLED): KILLS}
    assert len(killed.history.rounds) == ROUNDS
    assert (audit["exit_code"], audit["problems"]) == (0, [])
    assert audit["replayed_rounds"] == ROUNDS


def test_kills_leave_the_digests_of_a_run_never_killed(killed: Survived, calm: Survived) -> None:
    # Every island is in every round, so the bits must be the same.
    assert killed.history.counted() == calm.history.counted()
    assert killed.history.digests == calm.history.digests
