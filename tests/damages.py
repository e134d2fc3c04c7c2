"""Ways to damage a state directory, and what a coordinator makes of it when it starts.

A start here is that of `atoll serve` up to the first request, in this process.
"""

import contextlib
import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.clock import ManualClock
from atoll.coordinator import boot
from atoll.errors import StoreError
from atoll.launch import state
from atoll.launch.state import Addresses
from atoll.ledger.records import EvaluationRecord
from tests.clusters import Cluster, HandIsland
from tests.ledgers import alone

PAGE_BYTES = 4096
SETTINGS: dict[str, Any] = {
    "membership.quorum": 2,
    "storage.snapshot_every": 3,
    "download.codec": "bf16",
    "upload.codec": "fp32",
}
ROUNDS = 5


def play(home: Path, *, rounds: int = ROUNDS, settings: dict[str, Any] = SETTINGS) -> Cluster:
    """A run of five rounds and one more contribution: every table and every lease state is there.

    A third island joined and never contributed, so rows were reopened and taken again.
    """
    cluster = Cluster(home, settings)
    a, b = cluster.pair()
    cluster.island("c")
    cluster.rounds(rounds, a, b)
    alone(cluster.ledger).evaluations.add(EvaluationRecord(2, "a", 3.5, 7))
    alone(cluster.ledger).credentials.set({"worker": "1" * 64, "admin": "2" * 64})
    alone(cluster.ledger).control.set({"kicked/z": "1.000"})
    a.contribute()
    return cluster


@dataclass(frozen=True)
class Served:
    """What a coordinator would serve."""

    state: str
    version: int
    digest: str
    published: str
    # Damage that is told and left out: that of a queue, on which no row and no weight depends.
    named: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refused:
    """Why a coordinator did not start."""

    error: StoreError

    def __str__(self) -> str:
        return str(self.error)


def start(home: Path) -> Served | Refused:
    """Starts a coordinator on the directory, as `atoll serve` does, and ends it again."""
    try:
        with state.held(home, Addresses()) as stores:
            coordinator = boot.open_coordinator(stores, ManualClock())
            current = coordinator.weights.current
            return Served(
                stores.ledger.state_hash(),
                current.version,
                current.digests.master.root,
                current.digests.published.root,
                tuple(str(damage) for damage in stores.ledger.damage()),
            )
    except StoreError as error:
        return Refused(error)


def copied(home: Path, target: Path) -> Path:
    """A fresh copy of a state directory."""
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(home, target))


def flip(path: Path, place: int, *, bit: int = 0) -> None:
    """Changes one bit."""
    with path.open("r+b") as file:
        file.seek(place)
        [byte] = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ (1 << bit)]))


def zero_page(path: Path, page: int) -> None:
    """Makes a page of the file zeros."""
    with path.open("r+b") as file:
        file.seek(page * PAGE_BYTES)
        file.write(bytes(min(PAGE_BYTES, path.stat().st_size - page * PAGE_BYTES)))


def truncate(path: Path, nbytes: int) -> None:
    """Cuts the end of the file off."""
    with path.open("r+b") as file:
        file.truncate(nbytes)


def pages(path: Path) -> Iterator[tuple[int, int]]:
    """The start and size of every page of a file."""
    size = path.stat().st_size
    for start in range(0, size, PAGE_BYTES):
        yield start, min(PAGE_BYTES, size - start)


def rejoin(home: Path, *, rounds: int) -> Cluster:
    """Starts again on the directory, lets two islands join anew and complete so many rounds."""
    cluster = Cluster(home, SETTINGS)
    islands = [HandIsland(cluster, name).join() for name in ("a", "b")]
    for _ in range(rounds):
        for island in islands:
            if island.assignment().action == "train":
                island.contribute()
        cluster.settle()
    return cluster


def by_hand(path: Path, statement: str) -> None:
    """Changes rows from outside, as a person with a SQL shell does."""
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        assert connection.execute(statement).rowcount > 0, statement
