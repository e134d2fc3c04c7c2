"""A rank that is asked to go: what it finishes first, and how soon the others go on."""

import pytest

from tests.sharded_worlds import World, begun, is_consistent, when


class Departure:
    """How a rank went: when it was asked, when its script was left, and at which step."""

    asked = left = 0.0
    steps = 0


def leaving(world, *, after, times=1, size=3):
    """Rank 1 is asked to go within the step that follows its `after` steps."""
    found = Departure()
    loop = world.script

    def script(run, after_step):
        def asked():
            after_step()
            if run.worker_id == "rank-1" and run.steps == after and not found.asked:
                found.asked = world.scheduler.now()
                for _ in range(times):
                    run.interrupt()

        try:
            loop(run, asked)
        except KeyboardInterrupt:
            found.left, found.steps = world.scheduler.now(), run.steps
            world.coordinator.wanted = size - 1
            run.leave_now()

    world.script = script
    begun(world, size)
    return found


def test_step_under_way_is_made_and_its_save_is_what_the_others_go_on_from(tmp_path):
    world = World(tmp_path, wanted=3)
    found = leaving(world, after=5)
    world.run()

    assert found.steps == 6
    second = world.coordinator.formed[1]
    assert [m.worker_id for m in second.members] == ["rank-0", "rank-2"]
    assert second.restore.step == 6
    assert world.coordinator.missing == []  # nobody waited for it
    assert world.coordinator.committed == 3


def test_end_of_a_round_is_handed_in_before_the_rank_goes(tmp_path):
    world = World(tmp_path, wanted=3)
    committed = []
    found = leaving(world, after=7)
    when(world, lambda: found.left, lambda: committed.append(world.coordinator.committed))
    world.run()

    assert (found.steps, committed) == (8, [2])
    assert world.coordinator.formed[1].restore.step == 8


def test_second_wish_ends_at_once(tmp_path):
    world = World(tmp_path, wanted=3)
    found = leaving(world, after=5, times=2)
    world.run()

    assert (found.steps, found.left) == (5, found.asked)
    assert world.coordinator.formed[1].restore.step < 6  # its step is lost for all
    assert world.coordinator.committed == 3


def test_rank_that_waits_for_a_coordinator_that_is_away_goes_in_bounded_time(tmp_path):
    world = World(tmp_path, wanted=3)
    runs, left = {}, []
    loop = world.script

    def script(run, after_step):
        runs[run.worker_id] = run
        try:
            loop(run, after_step)
        except KeyboardInterrupt:
            left.append(world.scheduler.now())
            world.coordinator.wanted = 2
            world.coordinator.is_away = False
            run.leave_now()

    def away():
        world.coordinator.is_away = True
        world.scheduler.sleep(30.0)  # all wait at the end of the round by now
        asked.append(world.scheduler.now())
        runs["rank-1"].interrupt()

    asked: list[float] = []
    world.script = script
    begun(world, 3)
    when(world, lambda: is_consistent(world, 2), away)
    world.run()

    # What it may wait for an answer, and what the others would wait for it.
    assert 0 < left[0] - asked[0] < 5.0 + world.manifest.sharded.deadline_seconds + 30.0
    assert world.coordinator.committed == 3


def test_rank_without_a_group_goes_at_once(tmp_path):
    world = World(tmp_path, wanted=1)
    raised = []

    def script(run, _):
        with pytest.raises(KeyboardInterrupt):
            run.interrupt()
        raised.append(run.worker_id)

    world.script = script
    begun(world, 1)
    world.run()

    assert raised == ["rank-0"]
