"""When a coordinator ends by itself: the run is finished, and who is still there has left."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.clock import ManualClock
from atoll.protocol.messages import HeartbeatRequest, LeaveRequest
from tests import served
from tests.served import Served, Worker

TIMEOUT_SECONDS = 10.0
WAIT_SECONDS = 20.0
LOOKS = 3  # of the server at who is still there


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def coordinator(tmp_path: Path, clock: ManualClock) -> Iterator[Served]:
    with served.serving(
        tmp_path / "state",
        clock=clock,
        stay=False,
        heartbeat_interval=1.0,
        heartbeat_timeout=TIMEOUT_SECONDS,
        membership={"min_workers": 2},
        stop={"rounds": 1},
    ) as running:
        yield running


@pytest.fixture
def workers(coordinator: Served) -> list[Worker]:
    """Two workers whose run is finished; neither has left."""
    made = [coordinator.worker(name) for name in ("alice", "bob")]
    finished = threading.Event()

    def look() -> None:
        if coordinator.coordinator.is_finished():
            finished.set()

    coordinator.coordinator.on_change(look)
    frames = [worker.frame() for worker in made]
    for worker, frame in zip(made, frames, strict=True):
        worker.link.upload(worker.identity(), frame, before_commit=lambda: None)
    assert finished.wait(WAIT_SECONDS)
    return made


class Looks:
    """Tells when the server has looked at who is still there, so that nothing sleeps."""

    def __init__(self, coordinator: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        real = coordinator.coordinator.members
        self._counted = threading.Semaphore(0)

        def members() -> list[str]:
            found = real()
            self._counted.release()
            return found

        monkeypatch.setattr(coordinator.coordinator, "members", members)

    def wait(self) -> None:
        """Returns after some looks that begin from now on."""
        while self._counted.acquire(blocking=False):
            pass
        for _ in range(LOOKS):
            assert self._counted.acquire(timeout=WAIT_SECONDS)


def test_server_ends_once_every_island_has_left(coordinator: Served, workers: list[Worker]) -> None:
    for worker in workers:
        worker.link.send(LeaveRequest(identity=worker.identity()))

    assert coordinator.ended.wait(WAIT_SECONDS)


def test_server_ends_although_an_island_vanished(
    coordinator: Served,
    workers: list[Worker],
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alice, _ = workers
    alice.link.send(LeaveRequest(identity=alice.identity()))
    Looks(coordinator, monkeypatch).wait()
    ended_early = coordinator.ended.is_set()

    clock.advance(seconds=TIMEOUT_SECONDS + 1)

    assert not ended_early
    assert coordinator.ended.wait(WAIT_SECONDS)


def test_server_waits_for_a_slow_island_as_long_as_it_is_heard(
    coordinator: Served,
    workers: list[Worker],
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alice, bob = workers
    bob.link.send(LeaveRequest(identity=bob.identity()))
    looks = Looks(coordinator, monkeypatch)

    for _ in range(5):
        clock.advance(seconds=TIMEOUT_SECONDS - 1)
        alice.link.send(HeartbeatRequest(identity=alice.identity()))
        looks.wait()
    ended_early = coordinator.ended.is_set()
    alice.link.send(LeaveRequest(identity=alice.identity()))

    assert not ended_early
    assert coordinator.ended.wait(WAIT_SECONDS)


def test_server_goes_on_when_a_stop_is_taken_back(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served.serving(tmp_path / "stopped", clock=clock, stay=False) as coordinator:
        worker = coordinator.worker("alice")
        looks = Looks(coordinator, monkeypatch)
        coordinator.coordinator.order("stop")
        looks.wait()
        monkeypatch.undo()
        ending = coordinator.coordinator.is_stopping
        looked = threading.Semaphore(0)

        def is_stopping() -> bool:
            looked.release()
            return ending()

        monkeypatch.setattr(coordinator.coordinator, "is_stopping", is_stopping)

        coordinator.coordinator.order("run")
        worker.link.send(LeaveRequest(identity=worker.identity()))

        for _ in range(LOOKS):
            assert looked.acquire(timeout=WAIT_SECONDS)
        assert not coordinator.ended.is_set()


def test_signal_during_a_stop_leaves_it_to_the_next_start_which_carries_it_out(
    tmp_path: Path, clock: ManualClock
) -> None:
    home = tmp_path / "stopped"
    with served.serving(home, clock=clock, stay=False) as coordinator:
        coordinator.worker("alice")
        coordinator.coordinator.order("stop")  # alice trains on; the server is told to end

    with served.serving(home, clock=clock, stay=False) as coordinator:
        assert coordinator.coordinator.is_stopping()
        clock.advance(seconds=6001.0)  # alice is not heard any more
        assert coordinator.ended.wait(WAIT_SECONDS)

    with served.serving(home, clock=clock, stay=False) as coordinator:
        assert not coordinator.coordinator.is_stopping()
