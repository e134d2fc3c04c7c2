"""`kill -9` again and again, at seeded random moments of one run with three islands.

On SQLite with a directory, and on PostgreSQL with S3. How many kills is ATOLL_STORM_KILLS of the
coordinator, and about half of it of islands; `make storm` sets 50, and 20 of islands. A kill waits
for its place in the run, then for something to happen there (an upload recorded, a round frozen, a
version published), then for a random moment: kills land inside these moments and between them.
"""

import os
import random
import shutil
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import NullPool, create_engine, text

from atoll.errors import AtollError
from tests import lives, processes, servers
from tests.lives import CLOCK, POLL_SECONDS, History, Lives, Place
from tests.processes import KILLED

KILLS = int(os.environ.get("ATOLL_STORM_KILLS", "10"))
ROUNDS = max(30, 10 + 2 * KILLS)  # a round may pass while a killed coordinator starts again
LAST_KILL_BY = ROUNDS - 8  # so that none is left when the run ends
ISLANDS = ("island-0", "island-1", "island-2")
COORDINATOR = "coordinator"
# Sentences of the coordinator's log; "" is any moment.
EVENTS = ("contribution accepted", "contribution accepted", "round frozen", "round closed", "", "")

FROZEN = text("SELECT count(*) FROM rounds WHERE state = 'frozen'")
ACCEPTED = text(
    "SELECT count(*) FROM contributions WHERE round = "
    "(SELECT max(round) FROM rounds WHERE state <> 'planned')"
)

pytestmark = [pytest.mark.storm, pytest.mark.timeout(180 + 20 * KILLS)]


@dataclass(frozen=True)
class Kill:
    """One kill: from which version on, after what, how much later, of whom."""

    version: int
    event: str
    delay_seconds: float
    victim: str


def schedule(seed: int, *, coordinator: int, islands: int, until: int = LAST_KILL_BY) -> list[Kill]:
    """So many kills of each, spread over the run up to version `until`."""
    chance = random.Random(seed)
    victims = [COORDINATOR] * coordinator
    victims += [chance.choice(ISLANDS) for _ in range(islands)]
    chance.shuffle(victims)
    made = []
    for index, victim in enumerate(victims):
        event = chance.choice(EVENTS)
        longest = 0.02 if event and chance.random() < 0.7 else 0.4
        version = index * until // len(victims)
        made.append(Kill(version, event, chance.uniform(0.0, longest), victim))
    return made


@dataclass
class Storm:
    """Carries out a schedule and counts what the kills hit."""

    run: Lives
    version: int = 0
    exit_codes: Counter[tuple[str, int | None]] = field(default_factory=Counter)
    hit: Counter[str] = field(default_factory=Counter)  # what the ledger held after a kill

    def strike(self, kill: Kill) -> None:
        self.watch(kill)
        CLOCK.sleep(kill.delay_seconds)  # a random moment, not synchronisation
        victim = self.run.living[kill.victim]
        self.exit_codes[kill.victim.partition("-")[0], victim.kill()] += 1
        if kill.victim != COORDINATOR:
            self.run.join(kill.victim)
            return
        self.look()
        self.run.serve()

    def watch(self, kill: Kill) -> None:
        """Returns at the first such event from its version on."""
        deadline = CLOCK.now() + processes.LIMIT_SECONDS
        coordinator = self.run.living[COORDINATOR]
        self.read()  # what happened before counts for the version alone
        while True:
            for line in self.read():
                if kill.event and kill.event in line and self.version >= kill.version:
                    return
            if not kill.event and self.version >= kill.version:
                return
            if not coordinator.is_running() or CLOCK.now() > deadline:
                raise AtollError(f"{kill} found no moment; version {self.version}")
            CLOCK.sleep(POLL_SECONDS)

    def read(self) -> list[str]:
        lines = self.run.living[COORDINATOR].log.fresh()
        for line in lines:
            if "round closed" in line:
                self.version = max(self.version, int(line.partition("round=")[2].split()[0]))
        return lines

    def look(self) -> None:
        """Counts the state of the latest round, without doing the restart's recovery for it."""
        with create_engine(self.ledger(), poolclass=NullPool).connect() as connection:
            frozen = connection.execute(FROZEN).scalar_one()
            accepted = connection.execute(ACCEPTED).scalar_one()
        self.hit["frozen" if frozen else f"open with {accepted}"] += 1

    def ledger(self) -> str:
        """The database; of SQLite a copy."""
        if self.run.place.ledger is not None:
            return self.run.place.ledger
        copy = self.run.home / "copy"
        copy.mkdir(exist_ok=True)
        for name in ("ledger.sqlite", "ledger.sqlite-wal"):
            (copy / name).unlink(missing_ok=True)
            if (self.run.directory() / name).exists():
                shutil.copy(self.run.directory() / name, copy / name)
        return f"sqlite:///{copy / 'ledger.sqlite'}"


@dataclass(frozen=True)
class Survived:
    """What a run that was killed so often came to."""

    storm: Storm
    history: History
    audit: dict[str, Any]


def survive(
    home: Path, place: Place, kills: list[Kill], *, min_workers: int, retain: str
) -> Survived:
    """A whole run under `kills`."""
    home.mkdir(parents=True, exist_ok=True)
    file = lives.run_file(
        home / "run.toml", place, rounds=ROUNDS, min_workers=min_workers, retain=retain
    )
    with Lives(home, file, place) as run:
        run.serve()
        for name in ISLANDS:
            run.join(name)
        storm = Storm(run)
        for kill in kills:
            storm.strike(kill)
        run.finish_all()
        return Survived(storm, run.history(), run.audit())


@pytest.fixture(
    scope="module",
    params=[
        "sqlite-directory",
        pytest.param("postgres-s3", marks=[pytest.mark.postgres, pytest.mark.s3]),
    ],
)
def stores(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def place(stores: str, request: pytest.FixtureRequest) -> Place:
    """A place of its own for a run."""
    if stores == "sqlite-directory":
        return Place()
    name = f"kills_{uuid.uuid4().hex}"
    postgres = request.getfixturevalue("postgres_server")
    return Place(
        ledger=servers.create_database(postgres, name),
        blobs=f"s3://{servers.BUCKET}/{name}",
        s3=lives.s3_access(request.getfixturevalue("s3_server")),
    )


def number_of_kills(stores: str) -> int:
    """All of them everywhere in a storm; a third beside servers that answer slower otherwise."""
    return KILLS if stores == "sqlite-directory" or KILLS > 10 else max(1, KILLS // 3)


@pytest.fixture(scope="module")
def never_killed(tmp_path_factory: pytest.TempPathFactory) -> Survived:
    home = tmp_path_factory.mktemp("never-killed")
    return survive(home, Place(), [], min_workers=len(ISLANDS), retain="all")


@pytest.fixture(scope="module")
def coordinator_killed(
    stores: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Survived:
    kills = schedule(1, coordinator=number_of_kills(stores), islands=0)
    where = place(stores, request)
    home = tmp_path_factory.mktemp("coordinator-killed")
    return survive(home, where, kills, min_workers=len(ISLANDS), retain="all")


@pytest.fixture(scope="module")
def all_killed(
    stores: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Survived:
    count = number_of_kills(stores)
    kills = schedule(
        2, coordinator=count, islands=max(1, count // 2 if count <= 10 else count * 2 // 5)
    )
    where = place(stores, request)
    home = tmp_path_factory.mktemp("all-killed")
    return survive(home, where, kills, min_workers=2, retain="snapshots")


def test_kills_of_the_coordinator_leave_the_digest_of_a_run_never_killed(
    coordinator_killed: Survived, never_killed: Survived, stores: str
) -> None:
    killed = coordinator_killed.storm.exit_codes

    assert killed == {(COORDINATOR, KILLED): number_of_kills(stores)}
    assert coordinator_killed.history.digests[-1] == never_killed.history.digests[-1]
    assert coordinator_killed.history.digests == never_killed.history.digests


def test_kills_of_the_coordinator_neither_lose_nor_repeat_a_contribution(
    coordinator_killed: Survived, never_killed: Survived
) -> None:
    counted = coordinator_killed.history.counted()

    assert len(counted) == ROUNDS * len(ISLANDS)
    assert counted == never_killed.history.counted()


def test_run_with_a_killed_coordinator_replays_clean(coordinator_killed: Survived) -> None:
    audit = coordinator_killed.audit

    assert (audit["exit_code"], audit["problems"]) == (0, [])
    assert audit["replayed_rounds"] == ROUNDS


def test_run_with_coordinator_and_islands_killed_completes_and_replays_clean(
    all_killed: Survived, stores: str
) -> None:
    count = number_of_kills(stores)
    killed = all_killed.storm.exit_codes
    print(f"{stores}: {dict(killed)}, the ledger after a kill: {dict(all_killed.storm.hit)}")

    assert killed[COORDINATOR, KILLED] == count
    assert killed["island", KILLED] == sum(killed.values()) - count >= 1
    assert len(all_killed.history.rounds) == ROUNDS
    assert (all_killed.audit["exit_code"], all_killed.audit["problems"]) == (0, [])
