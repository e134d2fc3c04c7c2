"""Who counts as live."""

from atoll.clock import ManualClock
from atoll.coordinator.members.heartbeats import Heartbeats
from atoll.protocol.messages import Telemetry


def made(timeout_seconds: float = 10.0) -> tuple[Heartbeats, ManualClock]:
    clock = ManualClock()
    return Heartbeats(clock, timeout_seconds=timeout_seconds), clock


def test_worker_is_live_up_to_the_timeout_and_not_after():
    heartbeats, clock = made()
    heartbeats.hear("a")

    clock.advance(seconds=10.0)
    at_timeout = heartbeats.live(["a"])
    clock.advance(seconds=0.001)

    assert at_timeout == {"a"}
    assert heartbeats.live(["a"]) == frozenset()


def test_worker_never_heard_is_not_live():
    heartbeats, _ = made()

    assert heartbeats.live(["a"]) == frozenset()
    assert heartbeats.seconds_since("a") is None


def test_worker_heard_again_is_live_again():
    """A worker taken for dead comes back by being heard."""
    heartbeats, clock = made()
    heartbeats.hear("a")
    clock.advance(seconds=100)

    heartbeats.hear("a")

    assert heartbeats.live(["a"]) == {"a"}


def test_worker_that_left_is_not_live_at_once():
    heartbeats, _ = made()
    heartbeats.hear("a")

    heartbeats.forget("a")

    assert heartbeats.live(["a"]) == frozenset()


def test_only_candidates_are_live():
    heartbeats, _ = made()
    heartbeats.hear("a")
    heartbeats.hear("b")

    assert heartbeats.live(["b", "c"]) == {"b"}


def test_seconds_since_counts_from_the_last_sign_of_life():
    heartbeats, clock = made()
    heartbeats.hear("a")
    clock.advance(seconds=3)
    heartbeats.hear("a")
    clock.advance(seconds=4)

    assert heartbeats.seconds_since("a") == 4


def test_telemetry_outlives_messages_without_any():
    heartbeats, _ = made()
    heartbeats.hear("a", Telemetry(round=3, step=7))

    heartbeats.hear("a")

    assert heartbeats.telemetry("a") == Telemetry(round=3, step=7)
    assert heartbeats.telemetry("b") == Telemetry()
