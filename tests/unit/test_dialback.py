"""Dialling a worker where it says it is, for runs in which ranks dial each other."""

import socket

import pytest

from atoll.clock import ManualClock, SystemClock
from atoll.coordinator.members.dialback import DIAL_SECONDS, PINGS, Dialback
from atoll.errors import AddressUnreachable


def test_worker_that_listens_is_reached_and_its_ping_reported():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        reach = Dialback(SystemClock())

        reach.check("a", "127.0.0.1", listener.getsockname()[1])

    assert 0 < reach.pings_ms()["a"] < 1000 * DIAL_SECONDS


def test_worker_that_does_not_listen_is_refused_by_name_and_address():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    reach = Dialback(SystemClock())

    with pytest.raises(AddressUnreachable, match=rf"'a' is not reached at 127\.0\.0\.1:{port}"):
        reach.check("a", "127.0.0.1", port)

    assert reach.pings_ms() == {}


def test_worker_without_a_port_is_refused():
    with pytest.raises(AddressUnreachable, match="'a' advertises no port"):
        Dialback(SystemClock()).check("a", "127.0.0.1", 0)


def test_fastest_of_a_few_pings_is_reported():
    clock = ManualClock()
    seconds = iter([0.2, 0.05, 0.1])
    dialled = []

    def dial(address: str, port: int, limit: float) -> None:
        dialled.append((address, port, limit))
        clock.advance(seconds=next(seconds))

    reach = Dialback(clock, dial=dial)
    reach.check("a", "10.0.0.1", 5)

    assert reach.pings_ms() == {"a": pytest.approx(50.0)}
    assert dialled == [("10.0.0.1", 5, DIAL_SECONDS)] * PINGS


def test_address_that_times_out_is_refused():
    def dial(_: str, __: int, limit: float) -> None:
        raise TimeoutError(f"timed out after {limit}")

    with pytest.raises(AddressUnreachable, match="timed out"):
        Dialback(ManualClock(), dial=dial).check("a", "10.0.0.1", 5)
