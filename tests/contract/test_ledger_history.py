"""The contributions of all rounds, however many there are, read by one statement."""

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from atoll.ledger.ledger import Ledger
from atoll.ledger.records import ContributionRecord, RoundPlan
from atoll.ledger.tables import contributions
from tests import ledgers
from tests.ledgers import MANIFEST, PUBLISHED, RUN, alone, contribution, lease, plan


def many_rounds(ledger: Ledger, count: int) -> None:
    """So many published rounds with two contributions each."""
    alone(ledger).run.create(RUN, MANIFEST)
    for name in ("a", "B"):
        alone(ledger).members.register(name, f"key {name}", wall=5.0)

    def rows(number: int) -> RoundPlan:
        first = 16 * (number - 1)
        leases = [lease(number, "a", first, first + 8), lease(number, "B", first + 8, first + 16)]
        return plan(number, leases)

    ledgers.begin(ledger, rows(1))
    for number in range(1, count + 1):
        for name in ("a", "B"):
            alone(ledger).contributions.accept(
                contribution(name, round=number, sha256=f"{name} in {number}")
            )
        ledgers.freeze(ledger, number, rows(number + 1))
        ledgers.publish(ledger, number, PUBLISHED)


def by_round(ledger: Ledger) -> list[ContributionRecord]:
    return [
        c
        for record in alone(ledger).rounds.all()
        for c in alone(ledger).contributions.of_round(record.round)
    ]


def test_every_contribution_comes_by_round_and_worker(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("atoll.ledger.connection.BATCH", 3)  # so that there are several
    many_rounds(ledger, 5)

    with ledger.reading() as t:
        every = list(t.contributions.every())

    assert every == by_round(ledger)
    assert len(every) == 10


def statements(act: Callable[[], object]) -> int:
    """How many statements a call sends."""
    with ledgers.listening() as sent:
        act()
    return len([text for text in sent if text.startswith("SELECT")])


def test_every_contribution_is_one_statement_however_many_rounds_there_are(ledger: Ledger):
    many_rounds(ledger, 12)

    def read() -> None:
        with ledger.reading() as t:
            assert len(list(t.contributions.every())) == 24

    assert statements(read) == 1
    assert statements(lambda: by_round(ledger)) > 12  # the control: what it stands for


def test_contributions_are_made_as_they_are_asked_for(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
):
    """A long history is never in memory as a whole; who stops early is done with it."""
    many_rounds(ledger, 4)
    made: list[object] = []

    def counted(*row: Any) -> ContributionRecord:
        made.append(row)
        return ContributionRecord(*row)

    with monkeypatch.context() as patched, ledger.reading() as t:
        patched.setattr(contributions, "ContributionRecord", counted)
        with closing(t.contributions.every()) as found:
            first = next(found)

    assert len(made) == 1
    assert alone(ledger).contributions.of_round(1)[0] == first
