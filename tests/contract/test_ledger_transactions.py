"""A ledger is read and changed by transaction: whole or not at all, one at a time."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from atoll import errors
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import DatasetRecord, EvaluationRecord, QueueRecord, SnapshotRecord
from tests.ledgers import MANIFEST, PUBLISHED, RUN, alone, contribution, lease, plan

WORDS = DatasetRecord("d" * 16, "words", 9, 1)
# Every call of a table that changes rows.
WRITES: dict[str, Callable[[Any], object]] = {
    "run.create": lambda t: t.run.create(RUN, MANIFEST),
    "manifests.add": lambda t: t.manifests.add(MANIFEST),
    "credentials.set": lambda t: t.credentials.set({"admin": "x"}),
    "control.set": lambda t: t.control.set({"action": "pause"}),
    "members.register": lambda t: t.members.register("new", "key", wall=1.0),
    "members.deregister": lambda t: t.members.deregister("a", 1, wall=1.0),
    "datasets.add": lambda t: t.datasets.add([WORDS]),
    "queues.open": lambda t: t.queues.open([QueueRecord("d" * 16, 0, 0, 9, 3)]),
    "rounds.begin": lambda t: t.rounds.begin([plan(1, [])]),
    "rounds.extend": lambda t: t.rounds.extend(plan(1, [lease(1, "c", 16, 24)])),
    "rounds.expire": lambda t: t.rounds.expire(1, ["a"]),
    "rounds.freeze": lambda t: t.rounds.freeze(1, None, ended=()),
    "rounds.publish": lambda t: t.rounds.publish(1, PUBLISHED),
    "contributions.accept": lambda t: t.contributions.accept(contribution("a")),
    "snapshots.add": lambda t: t.snapshots.add(SnapshotRecord(1, "m", "p", ())),
    "snapshots.drop": lambda t: t.snapshots.drop(1),
    "snapshots.drop_below": lambda t: t.snapshots.drop_below(1),
    "evaluations.add": lambda t: t.evaluations.add(EvaluationRecord(1, "a", 1.0, 1)),
}


@pytest.mark.parametrize("name", WRITES)
def test_transaction_that_reads_changes_nothing(started: Ledger, name: str):
    before = started.state_hash()

    with pytest.raises(errors.AtollError), started.reading() as t:
        WRITES[name](t)

    assert started.state_hash() == before


def test_refusal_of_a_change_names_the_way_out(started: Ledger):
    with (
        pytest.raises(errors.StoreError, match=r"use `ledger\.writing\(\)`"),
        started.reading() as t,
    ):
        t.control.set({"action": "pause"})


def test_all_changes_of_a_transaction_are_undone_with_the_last(started: Ledger):
    before = started.state_hash()

    def change() -> None:
        with started.writing() as t:
            t.control.set({"action": "pause"})
            t.members.deregister("a", 1, wall=1.0)
            t.members.deregister("nobody", 1, wall=1.0)

    with pytest.raises(errors.UnknownWorker):
        change()
    assert started.state_hash() == before


def test_transaction_sees_its_own_changes_and_others_do_after_it(started: Ledger):
    with started.writing() as t:
        t.control.set({"action": "pause"})
        inside = t.control.all()

    assert inside == alone(started).control.all() == {"action": "pause"}


def test_transactions_take_turns(started: Ledger):
    found: list[dict[str, str]] = []
    other = threading.Thread(target=lambda: found.append(alone(started).control.all()))

    with started.writing() as t:
        other.start()
        t.control.set({"action": "pause"})
        is_waiting = not found
    other.join(timeout=60)

    assert is_waiting
    assert found == [{"action": "pause"}]


def test_second_transaction_of_a_thread_is_refused_before_it_waits_for_itself(started: Ledger):
    with pytest.raises(AssertionError, match="use that one"), started.reading(), started.reading():
        pass

    assert alone(started).run.get() == RUN


def test_tables_are_of_no_use_after_their_transaction(started: Ledger):
    with started.reading() as t:
        pass

    with pytest.raises(AssertionError, match="inside it"):
        t.run.get()
