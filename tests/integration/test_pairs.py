"""An island of two ranks whose standing moves on under it: the ranks stay in step, nothing is lost.

On the virtual clock; ranks that would wait for different things end in GroupBroken.
"""

from pathlib import Path
from typing import Any

import pytest

from atoll.errors import UnknownWorker
from atoll.island.ranks import combine, parallel
from tests.ledgers import alone
from tests.pairs import PairSea
from tests.seas import Call, Fault, Sea, evicted

BEATS_SECONDS = 5.0  # two heartbeats and more
NEW = 0.2


@pytest.fixture(autouse=True, scope="module")
def uncombined():
    """Fibers cannot be a process group: the ranks train copies that nobody combines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(combine, "install", lambda *_, **__: None)
        patch.setattr(parallel, "spread", lambda model, *_, **__: model)
        yield


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> str:
    return PairSea(tmp_path_factory.mktemp("calm")).run()


def incarnation(sea: Sea) -> int:
    [worker] = [w for w in alone(sea.stores.ledger).members.workers() if w.worker_id == "a"]
    return worker.incarnation


def back_before_it(sea: Sea, call: Call) -> Any:
    """The heartbeats bring the island back, and then what it was doing goes on as the old life."""
    evicted(sea, lambda: None)
    assert "a" not in sea.coordinator.members()
    sea.scheduler.sleep(BEATS_SECONDS)
    assert "a" in sea.coordinator.members()
    assert incarnation(sea) == 2
    return call()


def back_after_its_refusal(sea: Sea, call: Call) -> Any:
    """The island is told that it is out, and before it registers its heartbeats have done so."""
    try:
        return evicted(sea, call)
    except UnknownWorker:
        sea.scheduler.sleep(BEATS_SECONDS)
        assert incarnation(sea) == 2
        raise


FAULTS: dict[str, tuple[str, int, Fault]] = {
    "evicted in a long step": ("step", 3, back_before_it),
    "evicted in a step": ("step", 3, evicted),
    "back before an assignment": ("assignment", 5, back_before_it),
    "back before a download": ("download", 2, back_before_it),
    "back before an upload": ("upload", 2, back_before_it),
    "back after the refusal of an assignment": ("assignment", 5, back_after_its_refusal),
    "back after the refusal of a download": ("download", 2, back_after_its_refusal),
    "back after the refusal of an upload": ("upload", 2, back_after_its_refusal),
}


@pytest.mark.parametrize("name", FAULTS)
def test_pair_that_is_evicted_comes_back_in_step_and_loses_nothing(tmp_path, calm, name):
    method, count, fault = FAULTS[name]
    sea = PairSea(tmp_path)
    sea.faults["a", method, count] = fault

    assert sea.run() == calm
    assert sea.calls["a", method] >= count
    assert sea.lives["a"] == 1
    assert [w.incarnation for w in sea.status.workers if w.worker_id == "a"] == [2], (
        "came back once"
    )


def test_version_that_the_leader_hears_of_alone_is_adopted_by_both_ranks(tmp_path: Path):
    """A round closes without the pair, the next one is under a new version, and the leader is told
    so while it sends: all ranks ask again."""
    sea = PairSea(
        tmp_path, **{"stop.rounds": 5, "membership.quorum": 1, "membership.min_workers": 1}
    )

    def slow(sea: Sea, call: Call) -> Any:
        sea.coordinator.set_outer_lr(NEW)
        sea.scheduler.sleep(BEATS_SECONDS)
        return call()

    def waits(sea: Sea, call: Call) -> Any:
        sea.scheduler.sleep(4 * BEATS_SECONDS)
        return call()

    sea.faults["a", "step", 3] = slow
    sea.faults["b", "step", 7] = waits  # in the round after, which the pair takes part in

    sea.run()

    assert sea.stale["a"] > 0
    assert sea.versions[0] == sea.versions[1]
    assert set(sea.versions[0]) == {1, 2}
