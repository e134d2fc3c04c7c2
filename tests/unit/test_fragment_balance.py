"""Which fragments the rows that are done have got into, from records alone."""

import pytest

from atoll.ledger.records import ContributionRecord, RoundRecord, RoundState
from atoll.proof import pairs
from atoll.strategies.base import ALL
from tests.ledgers import contribution

ROWS = 10


def rounds(*fragments: int, closed: int) -> list[RoundRecord]:
    """Rounds that carry these fragments, of which so many are closed."""
    return [
        RoundRecord(
            number, RoundState.FROZEN if number <= closed else RoundState.OPEN, "2" * 64, 0, carried
        )
        for number, carried in enumerate(fragments, start=1)
    ]


def made(number: int, first: int, fragment: int, worker_id: str = "a") -> ContributionRecord:
    about = {"applied": number, "first": first, "fragment": fragment, "rows": ROWS}
    return contribution(worker_id, round=number, **about)


def told(found: list[pairs.FragmentBalance]) -> list[tuple[int, int, int, int]]:
    return [
        (f.counted // ROWS, f.to_come // ROWS, f.missed // ROWS, f.twice // ROWS) for f in found
    ]


def test_fragments_that_no_round_has_carried_are_listed():
    found = pairs.balance(rounds(0, 1, closed=1), [made(1, 1, 0)], fragments=3)

    assert told(found) == [(1, 0, 0, 0), (0, 1, 0, 0), (0, 1, 0, 0)]


def test_round_of_all_in_a_run_that_is_shorter_than_its_fragments_counts_in_each():
    found = pairs.balance(rounds(0, ALL, closed=2), [made(1, 1, 0), made(2, 1, ALL)], fragments=3)

    assert told(found) == [(2, 0, 0, 0)] * 3


def test_rows_of_an_island_that_began_anew_are_missed_where_it_had_not_come_to():
    handed_in = [made(1, 1, 0), made(3, 3, 0), made(4, 3, 1)]

    found = pairs.balance(rounds(0, 1, 0, 1, closed=4), handed_in, fragments=2)

    assert told(found) == [(2, 1, 0, 0), (2, 0, 1, 0)]


def test_rows_in_two_contributions_of_a_fragment_do_not_hold():
    found = pairs.balance(rounds(0, 0, closed=2), [made(1, 1, 0), made(2, 1, 0)], fragments=2)

    assert [f.holds for f in found] == [False, True]


@pytest.mark.parametrize("count", [0, 1])
def test_one_fragment_has_no_balance_of_its_own(count):
    assert pairs.balance(rounds(0, closed=1), [made(1, 1, 0)], fragments=count) == []
