"""The order of a ring, who goes when ranks miss each other, and what is gone back to."""

from atoll.coordinator.sharded import regions, restoring, suspicion
from atoll.ledger.records import SaveRecord
from atoll.protocol.sharded import HeldSave


def pings(near: list[set[str]], *, far_ms: float = 80.0) -> dict[str, dict[str, float]]:
    """1 ms inside each of `near`, `far_ms` between them."""
    everybody = sorted(set().union(*near))
    return {
        one: {
            other: 1.0 if any({one, other} <= region for region in near) else far_ms
            for other in everybody
            if other != one
        }
        for one in everybody
    }


def test_ring_goes_region_by_region_and_inside_by_worker_id():
    found = regions.ring("abcdef", pings([{"a", "d", "f"}, {"b", "c", "e"}]))

    assert found == ["a", "d", "f", "b", "c", "e"]


def test_ring_of_one_region_is_by_worker_id():
    assert regions.ring(["c", "a", "b"], pings([{"a", "b", "c"}])) == ["a", "b", "c"]


def test_latency_of_exactly_the_limit_is_one_region_and_more_is_not():
    at, above = (pings([{"a", "c"}, {"b"}], far_ms=ms) for ms in (50.0, 50.1))

    assert regions.ring("abc", at) == ["a", "b", "c"]
    assert regions.ring("abc", above) == ["a", "c", "b"]


def test_faster_direction_counts():
    measured = pings([{"a", "c"}, {"b"}])
    measured["b"]["a"] = 20.0

    assert regions.ring("abc", measured) == ["a", "b", "c"]


def test_region_reaches_through_others():
    measured = pings([{"a", "b"}, {"b", "c"}, {"d"}])

    assert regions.ring("abcd", measured) == ["a", "b", "c", "d"]


# Suspicion


def test_rank_that_more_miss_goes():
    assert suspicion.verdict({"a": {"b"}, "c": {"b"}, "b": {"d"}}, "abcd") == "b"


def test_higher_of_two_that_miss_each_other_goes():
    assert suspicion.verdict({"a": {"b"}, "b": {"a"}}, "abc") == "b"


def test_silent_rank_goes_before_one_that_waits_itself():
    """In a ring each misses the one before it; only the one that hangs says nothing."""
    assert suspicion.verdict({"b": {"a"}, "c": {"b"}, "d": {"c"}}, "abcd") == "a"


def test_nobody_goes_whom_nobody_else_misses():
    assert suspicion.verdict({"a": {"x"}}, "ab") is None
    assert suspicion.verdict({"a": {"a"}}, "ab") is None


def test_pings_that_are_absent_are_misses():
    measured = pings([{"a", "b", "c"}])
    del measured["a"]["c"]

    assert suspicion.unreached("abc", measured) == {"a": {"c"}}


# What is gone back to


def saves(group: int, step: int, size: int) -> list[SaveRecord]:
    return [
        SaveRecord(group, step, rank, root(group, step, rank), root(group, step, (rank - 1) % size))
        for rank in range(size)
    ]


def root(group: int, step: int, rank: int) -> str:
    return f"{group:02x}{step:04x}{rank:02x}".ljust(64, "0")


def held(group: int, step: int, rank: int, size: int) -> HeldSave:
    before = root(group, step, (rank - 1) % size)
    return HeldSave(
        step=step, group=group, rank=rank, own=root(group, step, rank), predecessor=before
    )


def test_step_is_consistent_when_all_ranks_reported_it_and_agree():
    whole, lacking = saves(1, 6, 3), saves(1, 9, 3)[:2]
    torn = saves(1, 12, 3)
    torn[1] = SaveRecord(1, 12, 1, torn[1].own, "f" * 64)

    found = list(restoring.consistent([*torn, *lacking, *whole], {1: 3}))

    assert found == [whole]


def test_survivors_hold_every_shard_after_one_death():
    step = saves(1, 6, 4)

    found = restoring.from_disks([step], [[held(1, 6, r, 4)] for r in (0, 2, 3)])

    assert found is not None
    assert (found.source, found.step, found.size) == ("save", 6, 4)
    # Shard 1 of the dead is its successor's, who is rank 1 of the new group.
    assert found.holders == ((0,), (1,), (1, 2), (0, 2))


def test_two_neighbours_dead_leave_a_shard_that_nobody_holds():
    step, older = saves(1, 6, 4), saves(1, 3, 4)

    assert restoring.from_disks([step, older], [[held(1, 6, r, 4)] for r in (0, 3)]) is None


def test_save_with_another_hash_does_not_count():
    step, mine = saves(1, 6, 2), held(1, 6, 0, 2)
    changed = mine.model_copy(update={"own": "e" * 64})

    assert restoring.from_disks([step], [[changed], [held(1, 6, 1, 2)]]) is not None
    assert restoring.from_disks([step], [[changed]]) is None


def test_older_step_is_taken_when_the_newer_one_is_not_whole():
    newer, older = saves(1, 6, 3), saves(1, 3, 3)
    disks = [[held(1, 3, 0, 3)], [held(1, 6, 2, 3), held(1, 3, 2, 3)]]

    found = restoring.from_disks([newer, older], disks)

    assert found is not None
    assert found.step == 3


def test_save_of_another_group_is_not_mixed_in():
    disks = [[held(1, 6, 0, 2)], [held(2, 6, 1, 2)]]

    assert restoring.from_disks([saves(2, 6, 2)], [disks[0]]) is None
    assert restoring.from_disks([saves(2, 6, 2)], disks) is not None
