"""Places to pull with, and whose fault a server's silence is."""

from atoll.clock import ManualClock
from atoll.coordinator.pull.places import QUICK_SECONDS, WIDTH, Places, Servers


def test_places_are_few_and_free_again_when_left():
    places = Places(ManualClock(), slots=2)
    assert [places.take((1, name), room=lambda: 9) for name in "ab"] == ["", ""]

    assert places.take((1, "c"), room=lambda: 9) == "one of 2 places to pull with"
    assert not places.call_again()
    places.leave((1, "a"))

    assert places.call_again() and not places.call_again()  # says so once
    assert places.take((1, "c"), room=lambda: 9) == ""


def test_slow_pull_keeps_no_place():
    clock = ManualClock()
    places = Places(clock, slots=1)
    places.take((1, "slow"), room=lambda: 9)
    assert places.take((1, "b"), room=lambda: 9)

    clock.advance(seconds=QUICK_SECONDS)

    assert places.call_again()
    assert places.take((1, "b"), room=lambda: 9) == ""


def test_slow_pulls_are_bounded_too():
    clock = ManualClock()
    places = Places(clock, slots=1)
    for number in range(WIDTH):
        assert places.take((1, f"{number}"), room=lambda: 99) == ""
        clock.advance(seconds=QUICK_SECONDS)

    assert places.take((1, "one more"), room=lambda: 99)


def test_worker_is_pulled_once_at_a_time_and_a_round_as_often_as_it_has_room():
    places = Places(ManualClock())
    assert places.take((1, "a"), room=lambda: 1) == ""

    assert places.take((1, "a"), room=lambda: 9) == "the pull that is under way"
    assert places.take((1, "b"), room=lambda: 1) == "pulls of round 1 that are under way"
    assert places.take((2, "b"), room=lambda: 1) == ""


def test_server_that_failed_is_asked_again_later_and_later():
    clock = ManualClock()
    servers = Servers(clock)
    waits = []
    for _ in range(6):
        servers.failed((1, "a"))
        seconds = 0.0
        while servers.is_waited_for((1, "a")):
            clock.advance(seconds=0.5)
            seconds += 0.5
        waits.append(seconds)
        assert servers.call_again() and not servers.call_again()

    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0]
    assert not servers.is_waited_for((1, "b"))


def test_answer_to_another_since_then_makes_it_the_workers_fault():
    clock = ManualClock()
    servers = Servers(clock)
    servers.answered("main", (1, "b"))
    began = clock.now()
    clock.advance(seconds=1.0)
    servers.answered("main", (1, "a"))
    servers.answered("other", (1, "b"))

    assert not servers.answered_others("main", "a", since=began)
    servers.answered("main", (1, "b"))
    assert servers.answered_others("main", "a", since=began)
