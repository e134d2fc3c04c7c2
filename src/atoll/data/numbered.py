"""Rows of a round by their numbers: which positions of which datasets the n-th ones are.

Pure, and needs no data: whoever knows the ranges of a round knows the order of its rows.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from atoll.layout import Span
from atoll.rows import RowRange


def in_turn(ranges: Sequence[RowRange]) -> Iterator[tuple[str, int]]:
    """The positions of `ranges`, each with its dataset_id, mixed evenly over the round.

    The next row always comes from the dataset that is furthest behind its share of the rows so far,
    on a tie from the one that comes first in `ranges`. Integers only, so that every machine finds
    the same order.
    """
    rows: dict[str, int] = {}
    for span in ranges:
        rows[span.dataset_id] = rows.get(span.dataset_id, 0) + len(span)
    places = {name: _places(ranges, name) for name in rows}
    given, total = dict.fromkeys(rows, 0), sum(rows.values())
    for count in range(1, total + 1):
        name = max(rows, key=lambda name: rows[name] * count - given[name] * total)
        given[name] += 1
        yield name, next(places[name])


def _places(ranges: Sequence[RowRange], name: str) -> Iterator[int]:
    return (p for s in ranges if s.dataset_id == name for p in range(s.start, s.stop))


def picked(ranges: Sequence[RowRange], numbers: Iterable[Span]) -> list[RowRange]:
    """The rows of `ranges` with these numbers, counted from 0 in the order of `in_turn`."""
    wanted = [span for span in numbers if len(span)]
    if not wanted:
        return []
    if len({span.dataset_id for span in ranges}) == 1:
        return joined(_one_after_the_other(ranges, wanted))
    chosen = {number for span in wanted for number in range(span.start, span.stop)}
    return joined(
        RowRange(name, place, place + 1)
        for number, (name, place) in enumerate(in_turn(ranges))
        if number in chosen
    )


def _one_after_the_other(ranges: Sequence[RowRange], wanted: Sequence[Span]) -> Iterator[RowRange]:
    """The same of one dataset, whose rows have no turns to take."""
    first = 0  # the number of the range's first row
    for span in ranges:
        for numbers in wanted:
            start, stop = max(numbers.start, first), min(numbers.stop, first + len(span))
            if start < stop:
                to_place = span.start - first
                yield RowRange(span.dataset_id, start + to_place, stop + to_place)
        first += len(span)


def joined(ranges: Iterable[RowRange]) -> list[RowRange]:
    """What the ranges cover, in order: those that touch or overlap are one."""
    found: list[RowRange] = []
    for one in sorted(ranges):
        last = found[-1] if found else None
        if last is not None and last.dataset_id == one.dataset_id and one.start <= last.stop:
            found[-1] = replace(last, stop=max(last.stop, one.stop))
        else:
            found.append(one)
    return found
