"""Barriers: complete when every member of the generation has come."""

import pytest

from atoll.coordinator.members.barriers import MAX_COMPLETE, MAX_OPEN, Barriers
from atoll.errors import ProtocolError, StaleGeneration
from atoll.ledger.records import GenerationRecord, MemberRecord


def generation(number: int = 1, names: str = "abc") -> GenerationRecord:
    members = tuple(MemberRecord(rank, name, 1, "", 0) for rank, name in enumerate(names))
    return GenerationRecord(number, 0.0, members)


@pytest.fixture
def completed() -> list[bool]:
    return []


@pytest.fixture
def barriers(completed: list[bool]) -> Barriers:
    return Barriers(on_complete=lambda: completed.append(True))


def test_barrier_names_who_is_missing_until_the_last_one_comes(barriers, completed):
    first = barriers.arrive(generation(), "round-1", "b")
    second = barriers.arrive(generation(), "round-1", "a")
    last = barriers.arrive(generation(), "round-1", "c")

    assert (first.missing, second.missing, last.missing) == (("a", "c"), ("c",), ())
    assert (first.complete, second.complete, last.complete) == (False, False, True)
    assert (first.arrived, last.arrived) == (1, 3)
    assert completed == [True]


def test_arrival_that_is_repeated_counts_once(barriers):
    barriers.arrive(generation(), "round-1", "a")

    assert barriers.arrive(generation(), "round-1", "a").missing == ("b", "c")


def test_whoever_asks_again_after_the_last_arrival_finds_it_complete(barriers, completed):
    """It must not begin a new barrier that nobody else comes to."""
    for name in "abc":
        barriers.arrive(generation(), "round-1", name)

    assert barriers.arrive(generation(), "round-1", "a").complete
    assert completed == [True]


def test_barriers_of_other_names_do_not_mix(barriers):
    barriers.arrive(generation(), "round-1", "a")

    assert barriers.arrive(generation(), "round-2", "b").missing == ("a", "c")


def test_barrier_of_a_new_generation_begins_empty(barriers):
    barriers.arrive(generation(1), "round-1", "a")

    assert barriers.arrive(generation(2), "round-1", "b").missing == ("a", "c")


def test_arrival_of_an_earlier_generation_is_refused_with_both_numbers(barriers):
    barriers.arrive(generation(5), "round-1", "a")

    with pytest.raises(StaleGeneration, match=r"generation=4 ended .* present one is 5") as refused:
        barriers.arrive(generation(4), "round-1", "b")

    assert refused.value.present == 5


def test_number_of_barriers_is_bounded(barriers):
    for number in range(MAX_OPEN):
        barriers.arrive(generation(), f"round-{number}", "a")

    with pytest.raises(ProtocolError, match=f"one more than {MAX_OPEN} that wait"):
        barriers.arrive(generation(), "one-more", "a")


def test_complete_barriers_make_room(barriers):
    pair = generation(names="ab")
    for n in range(2 * MAX_COMPLETE):
        barriers.arrive(pair, f"round-{n}", "a")
        barriers.arrive(pair, f"round-{n}", "b")

    again = [
        barriers.arrive(pair, f"round-{n}", "a").complete
        for n in (MAX_COMPLETE, 2 * MAX_COMPLETE - 1, MAX_COMPLETE - 1)
    ]

    assert again == [True, True, False]
