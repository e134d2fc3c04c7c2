"""An island of two ranks beside one of one process in an asynchronous run; the pair dies once.

The one of one process makes steps only as far as it is let, so who is how stale is the test's
choice: it hands in twice while the pair stands still in its first piece of work.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from atoll.coordinator.planes.access import Role
from atoll.island import trainer
from atoll.launch import joining
from atoll.ledger.records import ContributionRecord
from atoll.proof.report import AuditReport
from atoll.protocol.messages import Status
from tests import clusters, served, torchruns
from tests.ledgers import alone
from tests.processes import FAULTS, LIMIT_SECONDS, eventually
from tests.served import TOKENS, Served
from tests.torchruns import TorchrunGroup

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(240)]

ROUNDS, EVERY, AHEAD = 8, 3, 2
PAIR, SINGLE = "pair", "single"
KILLED_IN = AHEAD + 2  # what it trains after its first hand-in, which is round AHEAD + 1's
SETTINGS: dict[str, Any] = {
    "mode": "async",
    "sync_every": EVERY,
    "staleness_weighting": "inverse_sqrt",
    "heartbeat_interval": 1.0,
    "heartbeat_timeout": 60.0,
    "inner": {"batch": 3},
    "outer": {"optimizer": "delayed_nesterov", "delay": 2},
    "upload": {"codec": "bf16"},
    "download": {"codec": "bf16"},
    "membership": {"min_workers": 2},
    "evaluate": {"every": 2},
    "stop": {"rounds": ROUNDS},
}


class Gate:
    """Lets a thread make so many steps, then holds it until it is let further."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._may = 0.0
        self._made = 0

    def step(self) -> None:
        with self._changed:
            self._made += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._made < self._may, 2 * LIMIT_SECONDS)

    def let(self, steps: float) -> None:
        """So many steps in all; the thread stands still when it has made them."""
        with self._changed:
            self._may = steps
            self._changed.notify_all()

    def wait(self) -> None:
        """Returns once it stands still."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._made >= self._may, LIMIT_SECONDS)


@contextmanager
def single(run: Served, state: Path) -> Iterator[Gate]:
    """The island of one process, in a thread; it has ended with the block."""
    gate = Gate()
    joined = joining.join(run.url, token=TOKENS[Role.WORKER], worker_id=SINGLE, state=state)

    def work() -> None:
        try:
            trainer.train(joined, after_step=gate.step)
        finally:
            joined.release()

    thread = threading.Thread(target=work, name=SINGLE)
    thread.start()
    try:
        yield gate
    finally:
        gate.let(float("inf"))
        thread.join(LIMIT_SECONDS)
        assert not thread.is_alive()


@contextmanager
def pair(run: Served, home: Path, *, hold: str) -> Iterator[TorchrunGroup]:
    """`torchrun … atoll join`, whose leader stands still at the points that are given."""
    folder = home / "failpoints"
    folder.mkdir(exist_ok=True)
    (folder / "go.json").write_text("[]")
    words = [str(FAULTS / "island_with_failpoint.py"), hold, str(folder), "join", run.url]
    words += ["--worker-id", PAIR, "--state", str(home / PAIR), "--parallel", "ddp"]
    with torchruns.torchrun(words, home / f"{hold}.log") as group:
        yield group


@dataclass(frozen=True)
class Ended:
    """What the run came to."""

    at_the_kill: Status
    status: Status
    log: str  # of the pair's second life
    report: AuditReport
    contributions: list[ContributionRecord]

    def of(self, worker_id: str) -> list[tuple[int, int]]:
        """The rounds that it contributed for, and those that took it."""
        return [(c.round, c.applied) for c in self.contributions if c.worker_id == worker_id]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    home = tmp_path_factory.mktemp("asynchronous")
    held = home / "failpoints"
    with served.serving(home / "run", **SETTINGS) as run, single(run, home / SINGLE) as gate:
        gate.let(1)
        with pair(run, home, hold=f"hold@1,hold@{KILLED_IN}") as group:
            eventually("the pair in round 1", (held / "held-1").exists)
            gate.let(AHEAD * EVERY + 1)
            gate.wait()
            (held / "release-1").touch()
            eventually(f"the pair in round {KILLED_IN}", (held / f"held-{KILLED_IN}").exists)
            group.kill_all()
        at_the_kill = run.coordinator.status()
        with pair(run, home, hold="none@0") as group:
            gate.let(float("inf"))
            assert group.wait() == 0
            log = group.log()
        eventually("the end", lambda: run.coordinator.status().state == "finished")
        status = run.coordinator.status()
        contributions = list(alone(run.ledger).contributions.every())
    report, _ = clusters.audited(home / "run")
    return Ended(at_the_kill, status, log, report, contributions)


def test_run_with_a_pair_of_ranks_ends_and_replays_to_its_digest(ended):
    assert ended.report.problems == []
    assert (ended.report.rounds, ended.report.replayed_rounds) == (ROUNDS, ROUNDS)
    assert ended.report.digest == ended.status.digest == ended.status.history[-1].digest


def test_stale_work_of_a_pair_is_folded_by_the_round_that_is_open(ended):
    """The other one handed in for rounds 1 and 2 meanwhile."""
    assert ended.of(PAIR)[0] == (1, AHEAD + 1)
    assert ended.of(SINGLE)[:AHEAD] == [(1, 1), (2, 2)]


def test_killed_pair_goes_on_from_what_it_saved(ended):
    later = [(made_for, applied) for made_for, applied in ended.of(PAIR) if made_for >= KILLED_IN]

    assert ended.at_the_kill.version == KILLED_IN - 1
    assert "dropped" not in ended.log and "registered  worker=pair  incarnation=2" in ended.log
    assert later


def test_rounds_have_what_each_island_trained_and_nothing_else(ended):
    sizes = {(c.worker_id, c.rows) for c in ended.contributions}

    assert sizes == {(PAIR, 3 * EVERY), (SINGLE, 3 * EVERY)}
