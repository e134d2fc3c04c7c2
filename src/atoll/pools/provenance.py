"""Which part of a term a partial sum is of: who computed it, from which rows and items, and when.

Owns when two of them overlap, and their JSON. A row that is summed twice gives a wrong sum that
looks right; its coverage does not.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pydantic import BaseModel, ConfigDict

from atoll.errors import ProtocolError
from atoll.layout import Span
from atoll.sums.partial import check_count


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """What one rank covers of a term in a step.

    None of `rows`, or `items`, is all of them: a term that is not of rows at all has None. Rows are
    numbers of the whole batch, ascending and apart, items names of an axis, such as sites.
    """

    term: str
    rank: int
    step: int
    rows: tuple[Span, ...] | None = None
    items: tuple[str, ...] | None = None

    @classmethod
    def of(
        cls,
        term: str,
        *,
        rank: int,
        step: int,
        rows: Iterable[int] | None = None,
        items: Iterable[str] | None = None,
    ) -> "Provenance":
        """From rows' numbers and items' names, in any order; ProtocolError for one twice."""
        spans = None if rows is None else _spans(sorted(rows))
        names = None if items is None else tuple(sorted(items))
        if names is not None and len(set(names)) < len(names):
            raise ProtocolError(f"items={list(names)} of {term!r} name one twice; give each once")
        return cls(term=term, rank=rank, step=step, rows=spans, items=names)

    def __post_init__(self) -> None:
        if not self.term:
            raise ProtocolError(
                "a partial sum of no term cannot be told from others; name its term"
            )
        check_count("rank", self.rank)
        check_count("step", self.step)

    @property
    def is_empty(self) -> bool:
        """Whether it covers nothing."""
        return self.rows == () or self.items == ()

    def overlap(self, other: "Provenance") -> str | None:
        """What both cover, in words; None where they are apart."""
        row, item = _common_row(self.rows, other.rows), _common_item(self.items, other.items)
        if row is None or item is None:
            return None
        return " of ".join(filter(None, (row, item))) or "all of it"

    def __str__(self) -> str:
        return f"{self.term!r} on rank {self.rank} in step {self.step}"


Coverage = tuple[Provenance, ...]


def together(parts: Sequence[Provenance]) -> Coverage:
    """The coverage of a sum of these; ProtocolError where one is of another term or step, or twice.

    What one rank covers of the same items becomes one.
    """
    first = parts[0]
    for place, one in enumerate(parts):
        if (one.term, one.step) != (first.term, first.step):
            raise ProtocolError(f"{one} meets {first}; a sum is of one term in one step")
        for other in parts[:place]:
            if (both := one.overlap(other)) is not None:
                raise ProtocolError(
                    f"{one} covers {both}, which rank {other.rank} covers too; a sum has every row "
                    f"of every item once"
                )
    found: dict[tuple[int, tuple[str, ...] | None], Provenance] = {}
    for one in parts:
        same = found.get(_place(one))
        found[_place(one)] = one if same is None else replace(one, rows=_merged(same, one))
    return tuple(found.values())


def _place(one: Provenance) -> tuple[int, tuple[str, ...] | None]:
    """By which provenances of a sum are kept: rank and items."""
    return one.rank, one.items


def _merged(one: Provenance, other: Provenance) -> tuple[Span, ...] | None:
    """The rows of both, which do not overlap."""
    if one.rows is None or other.rows is None:
        return None
    spans = sorted((*one.rows, *other.rows), key=lambda span: span.start)
    found: list[Span] = []
    for span in spans:
        if found and found[-1].stop == span.start:
            found[-1] = Span(found[-1].start, span.stop)
        else:
            found.append(span)
    return tuple(found)


def _spans(rows: Sequence[int]) -> tuple[Span, ...]:
    found: list[Span] = []
    for row in rows:
        if row < 0 or (found and row < found[-1].stop):
            raise ProtocolError(f"row {row} is given twice or is below 0; give each row once")
        if found and found[-1].stop == row:
            found[-1] = Span(found[-1].start, row + 1)
        else:
            found.append(Span(row, row + 1))
    return tuple(found)


def _common_row(one: tuple[Span, ...] | None, other: tuple[Span, ...] | None) -> str | None:
    """The first row in both, in words, or "" where both have all; None where there is none."""
    if one is None and other is None:
        return ""
    if one is None or other is None:
        rest = other if one is None else one
        return f"row {rest[0].start}" if rest else None
    starts = [
        max(a.start, b.start)
        for a in one
        for b in other
        if max(a.start, b.start) < min(a.stop, b.stop)
    ]
    return f"row {min(starts)}" if starts else None


def _common_item(one: tuple[str, ...] | None, other: tuple[str, ...] | None) -> str | None:
    if one is None and other is None:
        return ""
    if one is None or other is None:
        rest = other if one is None else one
        return f"item {rest[0]!r}" if rest else None
    both = sorted(set(one) & set(other))
    return f"item {both[0]!r}" if both else None


class Told(BaseModel):
    """A provenance as it travels."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    term: str
    rank: int
    step: int
    rows: list[tuple[int, int]] | None
    items: list[str] | None

    @classmethod
    def of(cls, one: Provenance) -> "Told":
        rows = None if one.rows is None else [(span.start, span.stop) for span in one.rows]
        items = None if one.items is None else list(one.items)
        return cls(term=one.term, rank=one.rank, step=one.step, rows=rows, items=items)

    def provenance(self) -> Provenance:
        """ProtocolError for rows that no rank tells."""
        rows = None if self.rows is None else tuple(Span(*bounds) for bounds in self.rows)
        last = 0
        for span in rows or ():
            if not last <= span.start < span.stop:
                raise ProtocolError(
                    f"rows [{span.start}, {span.stop}) of {self.term!r} are no span"
                )
            last = span.stop
        items = None if self.items is None else tuple(self.items)
        return Provenance(term=self.term, rank=self.rank, step=self.step, rows=rows, items=items)
