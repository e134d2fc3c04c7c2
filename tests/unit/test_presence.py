"""Presence streams: noticed when they end, forgiven when they come back in time."""

from atoll.clock import ManualClock
from atoll.coordinator.members.presence import GRACE_SECONDS, Presence


class Bench:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.presence = Presence(self.clock)
        self.closed: list[str] = []

    def open(self, worker_id: str = "a", incarnation: int = 1):
        name = f"{worker_id}{incarnation}"
        return self.presence.open(worker_id, incarnation, lambda: self.closed.append(name))

    def overdue(self) -> list[tuple[str, int]]:
        return [(s.worker_id, s.incarnation) for s, _ in self.presence.overdue()]


def test_stream_that_ended_is_overdue_after_the_grace_period_and_not_before():
    bench = Bench()
    bench.presence.lose(bench.open())

    bench.clock.advance(seconds=GRACE_SECONDS)
    at_grace = bench.overdue()
    bench.clock.advance(seconds=0.001)

    assert at_grace == []
    assert bench.overdue() == [("a", 1)]


def test_stream_that_came_back_within_the_grace_period_is_forgiven():
    bench = Bench()
    bench.presence.lose(bench.open())
    bench.clock.advance(seconds=GRACE_SECONDS)

    bench.open()

    bench.clock.advance(seconds=100)
    assert bench.overdue() == []
    assert bench.presence.state("a") == "open"


def test_end_of_a_stream_that_was_replaced_means_nothing():
    bench = Bench()
    first = bench.open()
    bench.open()

    assert bench.closed == ["a1"]
    assert not bench.presence.lose(first)
    assert bench.presence.state("a") == "open"


def test_end_of_a_stream_is_noticed_once():
    bench = Bench()
    stream = bench.open()

    assert [bench.presence.lose(stream), bench.presence.lose(stream)] == [True, False]
    assert bench.presence.state("a") == "lost"


def test_stream_of_an_earlier_life_does_not_replace_that_of_a_later_one():
    bench = Bench()
    bench.open(incarnation=2)

    bench.presence.lose(bench.open(incarnation=1))

    assert bench.closed == ["a1"]
    assert bench.presence.state("a") == "open"


def test_worker_that_is_forgotten_is_not_missed_and_its_stream_is_ended():
    bench = Bench()
    stream = bench.open()

    bench.presence.forget("a", 1)
    bench.presence.lose(stream)

    bench.clock.advance(seconds=100)
    assert (bench.closed, bench.overdue()) == (["a1"], [])
    assert bench.presence.state("a") == "none"


def test_stream_of_a_later_life_outlives_the_end_of_an_earlier_one():
    bench = Bench()
    bench.open(incarnation=2)

    bench.presence.forget("a", 1)

    assert (bench.closed, bench.presence.state("a")) == ([], "open")


def test_streams_that_end_with_the_coordinator_are_not_missed():
    bench = Bench()
    stream = bench.open()

    bench.presence.stop()
    bench.presence.lose(stream)

    bench.clock.advance(seconds=100)
    assert (bench.closed, bench.overdue()) == (["a1"], [])
    bench.open("late")
    assert bench.closed == ["a1", "late1"]
