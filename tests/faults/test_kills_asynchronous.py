"""`kill -9` of coordinator and islands of an asynchronous run: it ends, replays, can be followed.

Real processes over a real network, at seeded random moments.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from atoll.launch import state
from atoll.simulate import follow
from tests import lives
from tests.faults.test_kills import COORDINATOR, Storm, schedule
from tests.lives import History, Lives, Place
from tests.processes import KILLED

KILLS = max(1, int(os.environ.get("ATOLL_STORM_KILLS", "4")) // 2)  # of each kind
ROUNDS = 10 + 5 * KILLS
ISLANDS = ("island-0", "island-1", "island-2")
MORE = """
mode = "async"
max_staleness = 4
staleness_weighting = "inverse_sqrt"
dylu = true

[outer]
optimizer = "delayed_nesterov"
delay = 3
"""

pytestmark = [pytest.mark.storm, pytest.mark.timeout(180 + 40 * KILLS)]


@dataclass(frozen=True)
class Survived:
    """What the run came to."""

    storm: Storm
    history: History
    audit: dict[str, Any]
    followed: follow.Followed


@pytest.fixture(scope="module")
def survived(tmp_path_factory: pytest.TempPathFactory) -> Survived:
    home = tmp_path_factory.mktemp("asynchronous-kills")
    file = lives.run_file(
        home / "run.toml", Place(), rounds=ROUNDS, min_workers=2, retain="all", more=MORE
    )
    with Lives(home, file) as run:
        run.serve()
        for name in ISLANDS:
            run.join(name)
        storm = Storm(run)
        for kill in schedule(3, coordinator=KILLS, islands=KILLS, until=ROUNDS - 6):
            storm.strike(kill)
        run.finish_all()
        return Survived(storm, run.history(), run.audit(), _followed(run, home / "again"))


def _followed(run: Lives, scratch: Path) -> follow.Followed:
    with state.at_rest(run.directory()) as (ledger, blobs):
        return follow.follow(ledger, blobs, scratch)


def test_run_under_kills_completes_and_replays_clean(survived: Survived) -> None:
    killed, audit = survived.storm.exit_codes, survived.audit
    print(f"{dict(killed)}, the ledger after a kill: {dict(survived.storm.hit)}")

    assert killed == {(COORDINATOR, KILLED): KILLS, ("island", KILLED): KILLS}
    assert len(survived.history.rounds) == ROUNDS
    assert (audit["exit_code"], audit["problems"]) == (0, [])
    assert audit["replayed_rounds"] == ROUNDS


def test_contributions_were_stale_and_none_above_the_bound(survived: Survived) -> None:
    staleness = [c.applied - c.round for c in survived.history.contributions]

    assert 0 < max(staleness) <= 4
    assert {c.worker_id for c in survived.history.contributions} == {*ISLANDS}


def test_training_what_the_records_say_gives_the_weights_of_the_processes(
    survived: Survived,
) -> None:
    assert survived.followed.agrees
    assert survived.followed.contributions == len(survived.history.contributions)
