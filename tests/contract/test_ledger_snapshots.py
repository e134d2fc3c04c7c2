"""Snapshots and evaluations in every ledger."""

import pytest

from atoll import errors
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import EvaluationRecord, SnapshotRecord
from tests.ledgers import alone


def test_snapshots_come_oldest_first_with_their_slots_in_order(ledger: Ledger):
    old = SnapshotRecord(3, "m", "p", ())
    new = SnapshotRecord(10, "m", "p", (("z", "s1"), ("a", "s2")))
    alone(ledger).snapshots.add(new)
    alone(ledger).snapshots.add(old)

    assert alone(ledger).snapshots.all() == [old, new]


def test_drop_snapshots_keeps_the_named_version(ledger: Ledger):
    for version in (1, 2, 3):
        alone(ledger).snapshots.add(SnapshotRecord(version, "m", "p", ()))

    alone(ledger).snapshots.drop_below(2)

    assert [s.version for s in alone(ledger).snapshots.all()] == [2, 3]


def test_add_snapshot_again_changes_nothing(ledger: Ledger):
    snapshot = SnapshotRecord(1, "m", "p", (("z", "s"),))
    alone(ledger).snapshots.add(snapshot)

    alone(ledger).snapshots.add(snapshot)

    assert alone(ledger).snapshots.all() == [snapshot]


def test_add_snapshot_refuses_other_blobs_of_the_same_version(ledger: Ledger):
    alone(ledger).snapshots.add(SnapshotRecord(1, "m", "p", ()))

    with pytest.raises(errors.StoreError, match="'other'"):
        alone(ledger).snapshots.add(SnapshotRecord(1, "other", "p", ()))


def test_first_evaluation_of_a_version_by_a_worker_stands(started: Ledger):
    first = EvaluationRecord(1, "a", 2.5, 10)
    alone(started).evaluations.add(first)

    alone(started).evaluations.add(EvaluationRecord(1, "a", 9.5, 99))

    assert alone(started).evaluations.all() == [first]


def test_evaluations_come_by_version_then_worker(started: Ledger):
    for version, name in [(10, "a"), (2, "b"), (2, "a")]:
        alone(started).evaluations.add(EvaluationRecord(version, name, 1.0, 1))

    found = [(e.version, e.worker_id) for e in alone(started).evaluations.all()]
    assert found == [(2, "a"), (2, "b"), (10, "a")]


def test_evaluation_by_an_unknown_worker_is_refused(started: Ledger):
    with pytest.raises(errors.UnknownWorker, match="'nobody'"):
        alone(started).evaluations.add(EvaluationRecord(1, "nobody", 1.0, 1))
