"""Seals follow every transaction of the ledger and nothing else."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.errors import UnknownWorker
from atoll.ledger import engines
from atoll.ledger.ledger import Ledger
from atoll.ledger.sqlite import seals
from tests.ledgers import alone, bare


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    opened = engines.open_ledger(tmp_path / "ledger.sqlite")
    alone(opened).members.register("a", "key", wall=1.5)
    yield opened
    opened.close()


def by_hand(ledger: Ledger, statement: str) -> None:
    with bare(ledger) as connection:
        connection.change(statement)


def test_inserted_changed_and_deleted_rows_keep_their_seals(ledger):
    alone(ledger).members.register("a", "key", wall=2.5)
    alone(ledger).control.set({"action": "pause", "number": "1"})
    alone(ledger).control.set({"action": None})
    alone(ledger).credentials.set({"admin": "x"})
    alone(ledger).credentials.set({"admin": "y"})

    assert ledger.damage() == []


def test_transaction_that_is_undone_leaves_the_seals(ledger):
    with pytest.raises(UnknownWorker):
        alone(ledger).members.deregister("nobody", 1, wall=3.0)

    assert ledger.damage() == []


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE workers SET registered_wall = 2.5",
        "DELETE FROM workers",
        "INSERT INTO workers VALUES ('b', 'key', 1, 1, 1.5)",
    ],
)
def test_change_from_elsewhere_is_found_and_not_sealed_by_the_next_transaction(ledger, statement):
    by_hand(ledger, statement)
    alone(ledger).control.set({"action": "pause"})

    [damage] = ledger.damage()

    assert damage.place == "workers"
    assert "ledger.sqlite" in str(damage)


def test_damage_names_what_was_expected_and_what_was_found(ledger):
    by_hand(ledger, "UPDATE workers SET incarnation = 2")

    [damage] = ledger.damage()

    assert damage.key == "'a'"
    assert damage.reason.count("1 rows with seal ") == 2


def test_changed_table_definition_is_found(ledger):
    by_hand(ledger, "ALTER TABLE workers RENAME COLUMN active TO passive")

    assert seals.SCHEMA in {damage.place for damage in ledger.damage()}


def test_copy_of_a_ledger_is_sealed(ledger, tmp_path):
    ledger.copy_to(str(tmp_path / "copy.sqlite"))

    copy = engines.open_ledger(tmp_path / "copy.sqlite")

    assert copy.damage() == []
    copy.close()
