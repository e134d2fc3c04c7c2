"""The contributions of all rounds, however many there are, read by one statement."""

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, event

from atoll.ledger import rows
from atoll.ledger.base import Ledger
from atoll.ledger.records import ContributionRecord, RoundPlan
from tests.ledgers import MANIFEST, PUBLISHED, RUN, contribution, lease, plan


def many_rounds(ledger: Ledger, count: int) -> None:
    """So many published rounds with two contributions each."""
    ledger.create_run(RUN, MANIFEST)
    for name in ("a", "B"):
        ledger.register(name, f"key {name}", wall=5.0)

    def rows(number: int) -> RoundPlan:
        first = 16 * (number - 1)
        leases = [lease(number, "a", first, first + 8), lease(number, "B", first + 8, first + 16)]
        return plan(number, leases)

    ledger.begin(rows(1))
    for number in range(1, count + 1):
        for name in ("a", "B"):
            ledger.accept(contribution(name, round=number, sha256=f"{name} in {number}"))
        ledger.freeze(number, rows(number + 1))
        ledger.publish(number, PUBLISHED)


def by_round(ledger: Ledger) -> list[ContributionRecord]:
    return [c for record in ledger.rounds() for c in ledger.contributions(record.round)]


def test_every_contribution_comes_by_round_and_worker(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("atoll.ledger.contributions.BATCH", 3)  # so that there are several
    many_rounds(ledger, 5)

    with ledger.every_contribution() as found:
        every = list(found)

    assert every == by_round(ledger)
    assert len(every) == 10


def statements(act: Callable[[], object]) -> int:
    """How many statements a call sends."""
    sent: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        sent.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        act()
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    return len([statement for statement in sent if statement != "BEGIN"])


def test_every_contribution_is_one_statement_however_many_rounds_there_are(ledger: Ledger):
    many_rounds(ledger, 12)

    def read() -> None:
        with ledger.every_contribution() as found:
            assert len(list(found)) == 24

    assert statements(read) == 1
    assert statements(lambda: by_round(ledger)) > 12  # the control: what it stands for


def test_contributions_are_made_as_they_are_asked_for(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
):
    """A long history is never in memory as a whole; who stops early is done with it."""
    many_rounds(ledger, 4)
    made: list[object] = []
    whole = rows.contribution

    def counted(row: Any) -> ContributionRecord:
        made.append(row)
        return whole(row)

    monkeypatch.setattr(rows, "contribution", counted)

    with ledger.every_contribution() as found:
        first = next(found)

    assert len(made) == 1
    assert ledger.contributions(1)[0] == first
