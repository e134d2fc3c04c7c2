"""Ranks of a sharded run as processes: killed, stopped and continued; their coordinator killed.

One run meets all of it, one after the other, and must end in the digest of a calm training along
the groups that it records.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from atoll.client.http import HttpClient
from atoll.clock import SystemClock
from atoll.errors import AtollError
from atoll.launch import local, state
from atoll.launch.local import LocalCoordinator, LocalIsland
from atoll.ledger.records import GroupRecord
from atoll.proof import audit as auditing
from atoll.protocol.control import ControlRequest
from atoll.protocol.messages import Status, StatusRequest
from atoll.simulate import lineage
from atoll.versions import recorded
from tests.processes import LIMIT_SECONDS, TOKENS
from tests.sharded_run_files import run_file

pytestmark = pytest.mark.xdist_group("sharded-killed")

HEARTBEAT_TIMEOUT = 3.0
MOST_SECONDS = HEARTBEAT_TIMEOUT + 10.0  # from a failure to the next step
NEIGHBOURS = ("c", "d")  # in a ring of a, c, d, e: the first one's shard is on these two disks
ASKED = "a rank that was asked to go"
RUN_FILE = run_file(
    "sharded-killed",
    """
[sharded]
save_every = 5
checkpoint_every = 2
deadline_seconds = 10
[evaluate]
every = 0
[stop]
rounds = 100000
""",
    width=8,
    top=f"heartbeat_interval = 0.5\nheartbeat_timeout = {HEARTBEAT_TIMEOUT}\n",
)


@dataclass
class Ranks:
    """The processes of one run; whoever is left ends with the test."""

    home: Path
    held: ExitStack
    clock: SystemClock = field(default_factory=SystemClock)
    islands: dict[str, LocalIsland] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # from each failure to the next step
    codes: dict[str, int] = field(default_factory=dict)  # with which those ended that were told to

    def serve(self, port: int = 0) -> None:
        file = self.home / "run.toml"
        file.write_text(RUN_FILE)
        options = ["--stay", "--port", str(port)]
        self.coordinator: LocalCoordinator = local.start_coordinator(
            file, self.home / "state", tokens=TOKENS, options=options
        )
        self.held.callback(self.coordinator.kill)
        self.coordinator.wait_ready(timeout_seconds=LIMIT_SECONDS)
        self.link = HttpClient(self.coordinator.url, token=TOKENS.admin)
        self.held.callback(self.link.close)

    def join(self, *names: str) -> None:
        for name in names:
            self.islands[name] = island = local.start_island(
                self.coordinator.url, self.home / name, worker_id=name, tokens=TOKENS
            )
            self.held.callback(island.kill)

    def status(self) -> Status:
        return self.link.send(StatusRequest())

    def wait(self, what: str, holds: Callable[[Status], object]) -> Status:
        deadline = self.clock.now() + LIMIT_SECONDS
        while self.clock.now() < deadline:
            try:
                status = self.status()
            except AtollError:
                continue
            if holds(status):
                return status
            self.clock.sleep(0.05)
        logs = "\n".join(island.log_tail(1500) for island in self.islands.values())
        raise AssertionError(f"{what} did not come; {self.coordinator.log_tail()}\n{logs}")

    def training(self, *names: str) -> Status:
        """Waits until exactly these train together and have saved since."""
        self.wait(f"a group of {names}", lambda s: set(s.ring) == set(names))
        return self.wait("its first save", lambda s: set(s.ring) == set(names) and s.consistent)

    def timed(self, failure: str, *names: str) -> None:
        """Waits until these have made a step after a failure that has just happened."""
        began, before = self.clock.now(), self.status().group
        self.wait(f"a group after {failure}", lambda s: set(s.ring) == set(names))
        number = self.status().group
        assert number != before
        steps = {w.worker_id: w.telemetry.tokens for w in self.status().workers}
        self.wait(
            "a step",
            lambda s: all(
                w.telemetry.tokens > steps[w.worker_id] for w in s.workers if w.worker_id in names
            ),
        )
        self.seconds[failure] = self.clock.now() - began


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with ExitStack() as held:
        found = Ranks(tmp_path_factory.mktemp("sharded-killed"), held)
        found.serve()
        found.join("a", "b", "c")
        found.training("a", "b", "c")

        os.kill(found.islands["b"].pid, signal.SIGKILL)
        found.timed("a killed rank", "a", "c")

        os.kill(found.islands["c"].pid, signal.SIGSTOP)
        found.timed("a stopped rank", "a")
        os.kill(found.islands["c"].pid, signal.SIGCONT)
        found.training("a", "c")

        port = int(found.coordinator.url.rpartition(":")[2])
        version = found.status().version
        group = found.status().group
        found.coordinator.kill()
        found.serve(port)
        after = found.wait("a checkpoint after it", lambda s: s.version > version)
        assert after.group == group

        found.join("d", "e")
        found.training("a", "c", "d", "e")

        for name in NEIGHBOURS:
            os.kill(found.islands[name].pid, signal.SIGKILL)
        found.timed("two killed neighbours", "a", "e")
        found.training("a", "e")

        began = found.clock.now()
        os.kill(found.islands["e"].pid, signal.SIGINT)
        found.codes["e"] = found.islands["e"].wait(timeout_seconds=HEARTBEAT_TIMEOUT + 7.0)
        found.training("a")
        found.seconds[ASKED] = found.clock.now() - began

        found.link.send(ControlRequest(action="stop"))
        assert found.islands["a"].wait(timeout_seconds=LIMIT_SECONDS) == 0
        found.coordinator.terminate()
        found.codes["coordinator"] = found.coordinator.wait(timeout_seconds=LIMIT_SECONDS)
        yield found


def groups_of(ranks: Ranks) -> list[GroupRecord]:
    with state.at_rest(ranks.home / "state") as (ledger, _), ledger.reading() as t:
        return t.groups.all()


def test_training_goes_on_within_the_heartbeat_timeout_and_ten_seconds(ranks: Ranks) -> None:
    print(ranks.seconds)
    expected = {"a killed rank", "a stopped rank", "two killed neighbours", ASKED}
    assert set(ranks.seconds) == expected
    assert max(ranks.seconds.values()) < MOST_SECONDS


def test_who_is_told_to_end_ends_with_the_code_for_it(ranks: Ranks) -> None:
    assert ranks.codes == {"e": 130, "coordinator": 0}
    assert "asked to leave" in ranks.islands["e"].log_tail(4000)


def test_survivors_went_back_to_a_save_and_not_to_the_start(ranks: Ranks) -> None:
    groups = groups_of(ranks)
    members = [[m.worker_id for m in group.members] for group in groups]

    assert ["a", "b", "c"] in members and ["a", "c", "d", "e"] in members
    # Two of them may have begun before the third came: those are not the survivors.
    together = members.index(["a", "b", "c"])
    after_kill = groups[members.index(["a", "c"], together)]
    assert after_kill.step > 0


def test_after_two_neighbours_died_the_others_went_back_to_a_checkpoint(ranks: Ranks) -> None:
    groups = groups_of(ranks)
    members = [[m.worker_id for m in group.members] for group in groups]

    after = groups[members.index(["a", "e"], members.index(["a", "c", "d", "e"]))]
    with state.at_rest(ranks.home / "state") as (ledger, _), ledger.reading() as t:
        checkpoints = [one.step for one in t.checkpoints.all()]
    assert after.step in checkpoints


def test_records_are_sound_and_end_where_a_calm_training_ends(ranks: Ranks) -> None:
    with state.at_rest(ranks.home / "state") as (ledger, blobs):
        manifest = recorded.manifest_of(ledger)
        assert manifest is not None
        layout = recorded.layout_of(manifest)
        report = auditing.audit(ledger, blobs, layout=layout, with_replay=False)
        again = lineage.retrained(ledger)

    assert report.clean, report.problems
    assert report.digest == again
