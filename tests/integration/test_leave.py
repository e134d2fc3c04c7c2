"""How an island says goodbye to a coordinator that may not hear it, or whose answer is lost."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.clock import ManualClock
from atoll.errors import CoordinatorUnreachable
from atoll.ids import WorkerId
from atoll.protocol.messages import LeaveRequest
from atoll.simulate.link import MemoryLink
from tests.clusters import Cluster, HandIsland
from tests.links import Driven

NAME = WorkerId("leaver")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


class Lossy(MemoryLink):
    """A link that loses the first goodbye, or the answer to it."""

    lost = "nothing"
    leaves = 0

    def send(self, message: Any, *, alone: bool = False) -> Any:
        if not isinstance(message, LeaveRequest):
            return super().send(message, alone=alone)
        self.leaves += 1
        if self.lost == "request" and self.leaves == 1:
            raise CoordinatorUnreachable
        reply = super().send(message)
        if self.lost == "reply" and self.leaves == 1:
            raise CoordinatorUnreachable
        return reply


@pytest.fixture
def link(cluster: Cluster) -> Lossy:
    return Lossy(lambda: cluster.coordinator, ManualClock())


@pytest.fixture
def session(cluster: Cluster, link: Lossy) -> Driven:
    made = Driven(link, worker_id=NAME)
    made.register(layout_digest=cluster.layout.digest, data_identity=cluster.manifest.data.identity)
    assert NAME in cluster.coordinator.members()
    return made


@pytest.mark.parametrize(("lost", "tries"), [("nothing", 1), ("request", 2), ("reply", 2)])
def test_island_leaves_over_a_lost_message(cluster, link, session, lost, tries):
    """A lost reply of a leave that got through is no error: there is nobody left to let go."""
    link.lost = lost

    session.leave()

    assert NAME not in cluster.coordinator.members()
    assert link.leaves == tries
    assert not session.is_registered


def test_leaving_again_says_nothing(link, session):
    session.leave()

    session.leave()

    assert link.leaves == 1


def test_goodbye_of_an_earlier_life_leaves_the_later_one_in(cluster, link, session):
    HandIsland(cluster, NAME, key="1" * 64).join()

    session.leave()

    assert NAME in cluster.coordinator.members()
