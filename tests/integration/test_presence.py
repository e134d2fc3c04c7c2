"""Presence, readiness and barriers over real HTTP and gRPC, and an island that was evicted."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.clock import SystemClock
from atoll.errors import Evicted, ProtocolError, StaleGeneration
from atoll.protocol.messages import BarrierRequest, HeartbeatRequest, ReadyRequest, WorkersRequest
from tests import processes, served
from tests.served import Served, Worker

CLOCK = SystemClock()
TIMEOUT_SECONDS = 1.5
SCAN_SECONDS = 0.25  # the closer's longest tick
BUSY_SECONDS = 1.0  # room for a busy machine, on top of what the rule allows


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Served]:
    with served.serving(tmp_path / "state", membership={"min_workers": 9}) as running:
        yield running


def members(coordinator: Served) -> list[str]:
    return [w.worker_id for w in coordinator.coordinator.ready(1).workers]


def presence(coordinator: Served, name: str) -> str:
    [found] = [w for w in coordinator.coordinator.workers().workers if w.worker_id == name]
    return found.presence


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def test_end_of_a_connection_is_noticed_and_evicts_within_two_seconds(coordinator: Served) -> None:
    """Heartbeats of this server would take 6000 s: only presence can have done it."""
    alice, bob = coordinator.worker("alice"), coordinator.worker("bob")
    kept = [w.link.attend(w.identity()) for w in (alice, bob)]
    began = CLOCK.now()

    alice.link.close()
    processes.eventually("alice's eviction", lambda: members(coordinator) == ["bob"])

    assert CLOCK.now() - began <= 2.0 + BUSY_SECONDS
    assert presence(coordinator, "bob") == "open"
    assert len(kept) == 2  # a stream ends with its last reference


def test_stream_that_is_opened_again_within_a_second_is_forgiven(coordinator: Served) -> None:
    alice, bob = coordinator.worker("alice"), coordinator.worker("bob")
    first = alice.link.attend(alice.identity())
    first.close()
    processes.eventually("the loss", lambda: presence(coordinator, "alice") == "lost")
    kept = alice.link.attend(alice.identity())
    # Later than alice's by as much as it takes; when it is over, hers would be too.
    bob.link.attend(bob.identity()).close()

    processes.eventually("bob's eviction", lambda: "bob" not in members(coordinator))

    assert members(coordinator) == ["alice"]
    kept.close()


def test_new_life_ends_the_earlier_ones_stream_over_the_network(coordinator: Served) -> None:
    alice = coordinator.worker("alice")
    earlier = alice.link.attend(alice.identity())
    thread, results = in_thread(earlier.wait)

    Worker(coordinator, "alice", island_key=alice.island_key).register()
    thread.join(processes.LIMIT_SECONDS)

    assert results == [None]


def test_evicted_worker_is_told_over_both_planes(coordinator: Served) -> None:
    alice = coordinator.worker("alice")
    alice.link.attend(alice.identity()).close()
    processes.eventually("the eviction", lambda: members(coordinator) == [])

    with pytest.raises(Evicted):
        alice.link.send(HeartbeatRequest(identity=alice.identity()))
    with pytest.raises(Evicted):
        alice.link.attend(alice.identity())


def test_refusal_names_the_present_generation_over_both_planes(coordinator: Served) -> None:
    alice = coordinator.worker("alice")
    old = alice.identity()
    coordinator.worker("bob")

    with pytest.raises(StaleGeneration) as http:
        alice.link.send(HeartbeatRequest(identity=old))
    with pytest.raises(StaleGeneration) as rpc:
        alice.link.attend(old)

    assert (http.value.present, rpc.value.present) == (2, 2)


def test_silent_worker_is_evicted_within_the_timeout_and_one_scan_in_real_time(
    tmp_path: Path,
) -> None:
    with served.serving(
        tmp_path / "state", heartbeat_interval=0.5, heartbeat_timeout=TIMEOUT_SECONDS
    ) as coordinator:
        began = CLOCK.now()
        coordinator.worker("alice")

        processes.eventually("the eviction", lambda: members(coordinator) == [])

    passed = CLOCK.now() - began
    assert TIMEOUT_SECONDS < passed <= TIMEOUT_SECONDS + SCAN_SECONDS + BUSY_SECONDS


def test_ready_and_workers_are_told_over_http(coordinator: Served) -> None:
    link = coordinator.worker("alice").link
    coordinator.worker("bob")

    ready, workers = link.send(ReadyRequest(min_workers=2)), link.send(WorkersRequest())

    assert (ready.ready, ready.active_workers, ready.generation) == (True, 2, 2)
    assert [(w.worker_id, w.ip_address, w.port, w.rank) for w in ready.workers] == [
        ("alice", "127.0.0.1", 0, 0),
        ("bob", "127.0.0.1", 0, 1),
    ]
    assert [(w.worker_id, w.state, w.rank) for w in workers.workers] == [
        ("alice", "live", 0),
        ("bob", "live", 1),
    ]


def test_barrier_lets_everybody_go_when_the_last_one_comes(coordinator: Served) -> None:
    alice, bob = coordinator.worker("alice"), coordinator.worker("bob")
    thread, results = in_thread(
        lambda: alice.link.send(
            BarrierRequest(name="round-1", identity=alice.identity(), wait_seconds=60.0)
        )
    )

    last = bob.link.send(BarrierRequest(name="round-1", identity=bob.identity(), wait_seconds=60.0))
    thread.join(processes.LIMIT_SECONDS)

    assert results == [last]
    assert last.complete


def test_barrier_that_was_waited_for_in_vain_names_who_is_missing(coordinator: Served) -> None:
    alice = coordinator.worker("alice")
    coordinator.worker("bob")
    coordinator.worker("carol")

    reply = alice.link.send(
        BarrierRequest(name="round-1", identity=alice.identity(), wait_seconds=0.1)
    )

    assert (reply.complete, reply.generation, reply.missing) == (False, 3, ("bob", "carol"))


def test_barrier_ends_at_once_when_somebody_joins(coordinator: Served) -> None:
    alice = coordinator.worker("alice")
    coordinator.worker("bob")
    request = BarrierRequest(name="round-1", identity=alice.identity(), wait_seconds=60.0)
    thread, results = in_thread(lambda: alice.link.send(request))

    coordinator.worker("carol")
    thread.join(processes.LIMIT_SECONDS / 2)

    [refused] = results
    assert isinstance(refused, StaleGeneration)
    assert refused.present == 3


@pytest.mark.parametrize("name", ["Round-1", "a b", "x" * 65, "é"])
def test_barrier_of_another_name_than_the_rule_allows_is_refused(
    coordinator: Served, name: str
) -> None:
    alice = coordinator.worker("alice")

    with pytest.raises(ProtocolError, match=r"body\.name|Not Found"):
        alice.link.send(BarrierRequest.model_construct(name=name, identity=alice.identity()))
