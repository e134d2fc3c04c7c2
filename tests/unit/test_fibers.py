"""Cooperative threads on a virtual clock: order, time, isolation, ends."""

import threading

import pytest
import torch

from atoll.errors import AtollError
from atoll.simulate.fibers import WALL_START, Scheduler, Stopped


def run(scheduler: Scheduler, *works, limit_seconds: float = 1e6) -> None:
    fibers = [scheduler.spawn(f"fiber {i}", work) for i, work in enumerate(works)]
    scheduler.run_until(lambda: all(f.done for f in fibers), limit_seconds=limit_seconds)


def test_fibers_run_in_the_order_of_their_wake_up_times():
    scheduler, seen = Scheduler(), []

    def sleeper(name: str, seconds: float):
        def work() -> None:
            for _ in range(2):
                scheduler.sleep(seconds)
                seen.append((name, scheduler.now()))

        return work

    run(scheduler, sleeper("slow", 3), sleeper("quick", 2))

    assert seen == [("quick", 2), ("slow", 3), ("quick", 4), ("slow", 6)]


def test_fibers_that_wake_together_run_in_the_order_they_slept():
    scheduler, seen = Scheduler(), []

    def work(name: str):
        def sleeper() -> None:
            scheduler.sleep(1)
            seen.append(name)

        return sleeper

    run(scheduler, work("a"), work("b"), work("c"))

    assert seen == ["a", "b", "c"]


def test_only_one_fiber_runs_at_a_time():
    scheduler = Scheduler()
    running, most = 0, 0

    def work() -> None:
        nonlocal running, most
        for _ in range(50):
            running += 1
            most = max(most, running)
            running -= 1
            scheduler.sleep(0)

    run(scheduler, work, work, work)

    assert most == 1


def test_clock_jumps_without_waiting():
    scheduler = Scheduler()

    run(scheduler, lambda: scheduler.sleep(1e5))

    assert scheduler.now() == 1e5
    assert scheduler.wall() == WALL_START + 1e5


def test_random_state_of_a_fiber_is_its_own():
    """Each island draws the numbers it would draw alone."""
    scheduler, drawn = Scheduler(), {}

    def draws(name: str, seed: int):
        def work() -> None:
            torch.manual_seed(seed)
            numbers = []
            for _ in range(3):
                numbers.append(torch.rand(2))
                scheduler.sleep(1)
            drawn[name] = torch.cat(numbers)

        return work

    run(scheduler, draws("a", 1), draws("b", 2))

    for name, seed in (("a", 1), ("b", 2)):
        torch.manual_seed(seed)
        alone = torch.cat([torch.rand(2) for _ in range(3)])
        assert torch.equal(drawn[name], alone)


def test_error_of_a_fiber_ends_the_simulation():
    scheduler = Scheduler()

    def broken() -> None:
        scheduler.sleep(5)
        raise AtollError("the island broke")

    def endless() -> None:
        while True:
            scheduler.sleep(1)

    with pytest.raises(AtollError, match="the island broke"):
        run(scheduler, broken, endless)

    assert scheduler.now() == 5


def test_simulation_is_stuck_when_no_fiber_can_wake():
    scheduler = Scheduler()
    scheduler.spawn("done at once", lambda: None)

    with pytest.raises(AtollError, match="stuck: no fiber has anything left to do"):
        scheduler.run_until(lambda: False, limit_seconds=10)


def test_simulation_ends_at_its_limit_of_virtual_time():
    scheduler = Scheduler()

    def endless() -> None:
        while True:
            scheduler.sleep(1)

    with pytest.raises(AtollError, match="did not finish in 100 virtual seconds"):
        run(scheduler, endless, limit_seconds=100)


def test_stopped_fiber_unwinds_like_a_killed_process():
    scheduler = Scheduler()
    seen: list[object] = []

    def victim() -> None:
        try:
            while True:
                scheduler.sleep(1)
                seen.append(scheduler.now())
        except Exception:
            seen.append("swallowed")
        finally:
            seen.append("unwound")

    fiber = scheduler.spawn("victim", victim)

    def killer() -> None:
        scheduler.sleep(2.5)
        scheduler.stop(fiber)
        scheduler.sleep(5)

    run(scheduler, killer)

    assert seen == [1, 2, "unwound"]
    assert fiber.done and fiber.error is None


def test_fiber_stopped_before_its_first_turn_never_runs():
    scheduler, seen = Scheduler(), []
    fiber = scheduler.spawn("never", lambda: seen.append("ran"))

    scheduler.stop(fiber)
    scheduler.run_until(lambda: fiber.done, limit_seconds=1)

    assert seen == []


def test_fiber_may_start_another_at_the_present_moment():
    scheduler, seen = Scheduler(), []

    def parent() -> None:
        scheduler.sleep(7)
        scheduler.spawn("child", lambda: seen.append(scheduler.now()))
        scheduler.sleep(1)

    run(scheduler, parent)

    assert seen == [7]


def test_fiber_that_waits_for_another_goes_on_at_the_moment_it_is_done():
    scheduler = Scheduler()
    seen: list[object] = []

    def waits() -> None:
        scheduler.wait_for(lambda: "done" in seen, threading.Condition())
        seen.append(scheduler.now())

    def works() -> None:
        scheduler.sleep(3)
        seen.append("done")
        scheduler.sleep(2)
        seen.append("later")

    run(scheduler, waits, works)

    assert seen == ["done", 3, "later"]


def test_fiber_does_not_wait_for_what_is_done():
    scheduler, seen = Scheduler(), []

    def goes_on() -> None:
        scheduler.wait_for(lambda: True, threading.Condition())
        seen.append("went on")

    run(scheduler, goes_on, lambda: seen.append("another"))

    assert seen == ["went on", "another"]


def test_simulation_in_which_all_wait_for_each_other_is_stuck():
    scheduler = Scheduler()

    def waits() -> None:
        scheduler.wait_for(lambda: False, threading.Condition())

    with pytest.raises(AtollError, match="stuck: no fiber has anything left to do"):
        run(scheduler, waits, waits)


def test_fiber_that_is_stopped_while_it_waits_for_another_unwinds():
    scheduler, seen = Scheduler(), []

    def waits() -> None:
        try:
            scheduler.wait_for(lambda: False, threading.Condition())
        finally:
            seen.append(scheduler.now())

    victim = scheduler.spawn("victim", waits)

    def killer() -> None:
        scheduler.sleep(2.5)
        scheduler.stop(victim)
        scheduler.sleep(5)

    run(scheduler, killer)

    assert seen == [2.5]
    assert victim.done and victim.error is None


def test_no_thread_outlives_the_simulation():
    scheduler = Scheduler()

    def endless() -> None:
        while True:
            scheduler.sleep(1)

    scheduler.spawn("background", endless)

    run(scheduler, lambda: scheduler.sleep(3))

    for thread in threading.enumerate():
        if thread.name == "background":
            thread.join(5)
    assert "background" not in [thread.name for thread in threading.enumerate()]


def test_unwinding_is_not_an_exception_that_code_may_swallow():
    assert not issubclass(Stopped, Exception)
