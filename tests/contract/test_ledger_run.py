"""A run, its manifests, credentials, workers and generations, in every ledger."""

from dataclasses import replace
from typing import Any

import pytest

from atoll import errors
from atoll.ledger import generations, schema, sql
from atoll.ledger.base import Ledger
from atoll.ledger.records import ManifestRecord
from tests.ledgers import MANIFEST, NAMES, RUN, plan

# The run, its credentials and workers


def test_ledger_returns_the_run_and_manifest_it_was_given(ledger: Ledger):
    ledger.create_run(RUN, MANIFEST)

    assert (ledger.run(), ledger.manifests()) == (RUN, [MANIFEST])


def test_new_ledger_holds_no_run(ledger: Ledger):
    assert (ledger.run(), ledger.manifests(), ledger.latest_round()) == (None, [], None)


def test_create_run_is_refused_when_the_ledger_holds_one(started: Ledger):
    before = started.state_hash()

    with pytest.raises(errors.StoreError, match=r"already holds run 'run-1'.*'run-2'"):
        started.create_run(replace(RUN, run_id="run-2"), replace(MANIFEST, version=2, sha256="x"))

    assert started.state_hash() == before


def test_control_sets_and_takes_away_names(ledger: Ledger):
    ledger.set_control({"action": "pause", "kicked/a": "1"})

    ledger.set_control({"kicked/a": None, "number": "2", "absent": None})

    assert ledger.control() == {"action": "pause", "number": "2"}


def test_set_credentials_replaces_only_the_given_roles(ledger: Ledger):
    ledger.set_credentials({"admin": "one", "worker": "two"})

    ledger.set_credentials({"worker": "three"})

    assert ledger.credentials() == {"admin": "one", "worker": "three"}


def test_register_gives_the_first_incarnation_to_a_new_worker(ledger: Ledger):
    record = ledger.register("a", "key", wall=1.5)

    assert (record.incarnation, record.active, record.key_sha256) == (1, True, "key")
    assert ledger.workers() == [record]


def test_register_again_is_the_next_incarnation_with_the_new_key(started: Ledger):
    started.deregister("a", 1, wall=0.0)

    record = started.register("a", "other", wall=2.5)

    assert (record.incarnation, record.active, record.key_sha256) == (2, True, "other")
    assert started.workers()[0] == record


def test_deregister_marks_the_worker_inactive(started: Ledger):
    started.deregister("b", 1, wall=0.0)

    assert [(w.worker_id, w.active) for w in started.workers()] == [
        ("a", True),
        ("b", False),
        ("c", True),
    ]


def test_deregister_of_an_earlier_incarnation_is_fenced(started: Ledger):
    started.register("a", "key a", wall=6.0)
    before = started.state_hash()

    with pytest.raises(errors.Fenced, match="incarnation 2"):
        started.deregister("a", 1, wall=0.0)

    assert started.state_hash() == before


def test_deregister_of_an_unknown_worker_is_refused(started: Ledger):
    with pytest.raises(errors.UnknownWorker, match="'nobody'"):
        started.deregister("nobody", 1, wall=0.0)


def test_workers_come_in_code_point_order(ledger: Ledger):
    for name in ["b", "_x", "Z.9", "a", "-dash", "B", "0"]:
        ledger.register(name, "key", wall=0.0)

    assert [w.worker_id for w in ledger.workers()] == NAMES


# Manifests

SECOND = ManifestRecord(version=2, sha256="8" * 64, body='{"a":"new"}', from_round=2)


def test_next_manifest_is_listed_after_the_first(started: Ledger):
    started.add_manifest(SECOND)

    assert started.manifests() == [MANIFEST, SECOND]


def test_manifest_before_the_first_round_is_in_force_from_it(ledger: Ledger):
    ledger.create_run(RUN, MANIFEST)

    ledger.add_manifest(replace(SECOND, from_round=1))

    assert [m.from_round for m in ledger.manifests()] == [1, 1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": 3}, "does not follow version 1"),
        ({"version": 1}, "does not follow version 1"),
        ({"from_round": 1}, "not planned is 2"),
        ({"from_round": 3}, "not planned is 2"),
        ({"sha256": MANIFEST.sha256}, "sha256 of an earlier one"),
    ],
)
def test_manifest_that_does_not_follow_is_refused_and_changes_nothing(
    started: Ledger, changes: dict[str, Any], reason: str
):
    before = started.state_hash()

    with pytest.raises(errors.StoreError, match=reason):
        started.add_manifest(replace(SECOND, **changes))

    assert started.state_hash() == before


def test_manifest_of_a_ledger_without_a_run_is_refused(ledger: Ledger):
    with pytest.raises(errors.StoreError, match="does not follow version 0"):
        ledger.add_manifest(replace(SECOND, version=1, from_round=1))

    assert ledger.manifests() == []


def test_manifest_counts_from_after_a_round_that_is_only_planned(started: Ledger):
    started.freeze(1, plan(2, []))

    with pytest.raises(errors.StoreError, match="not planned is 3"):
        started.add_manifest(SECOND)

    started.add_manifest(replace(SECOND, from_round=3))


# Generations


def ranks(ledger: Ledger) -> list[tuple[int, str, int, str, int]]:
    return [
        (m.rank, m.worker_id, m.incarnation, m.ip_address, m.port)
        for m in ledger.generation().members
    ]


def test_ledger_that_nobody_joined_is_at_generation_0(ledger: Ledger):
    assert (ledger.generation().number, ledger.generation().members) == (0, ())


def test_generation_has_the_active_workers_ranked_by_worker_id(ledger: Ledger):
    ledger.register("b", "key", wall=1.0, ip_address="10.0.0.2", port=7)
    ledger.register("a", "key", wall=2.0, ip_address="10.0.0.1", port=8)
    ledger.register("B", "key", wall=3.0)

    assert ledger.generation().number == 3
    assert ledger.generation().created_wall == 3.0
    assert ranks(ledger) == [
        (0, "B", 1, "", 0),
        (1, "a", 1, "10.0.0.1", 8),
        (2, "b", 1, "10.0.0.2", 7),
    ]


def test_takeover_is_a_new_generation_at_the_new_address(ledger: Ledger):
    ledger.register("a", "key", wall=1.0, ip_address="10.0.0.1", port=8)
    ledger.register("b", "key", wall=1.0, ip_address="10.0.0.2", port=7)

    ledger.register("a", "key", wall=2.0, ip_address="10.0.0.9", port=8)

    assert ledger.generation().number == 3
    assert ranks(ledger) == [(0, "a", 2, "10.0.0.9", 8), (1, "b", 1, "10.0.0.2", 7)]


def test_leave_is_a_new_generation_in_which_the_others_are_ranked_anew(ledger: Ledger):
    ledger.register("a", "key", wall=1.0)
    ledger.register("b", "key", wall=1.0, ip_address="10.0.0.2", port=7)

    ledger.deregister("a", 1, wall=2.0)

    assert ledger.generation().number == 3
    assert ranks(ledger) == [(0, "b", 1, "10.0.0.2", 7)]


def test_leave_that_is_repeated_or_refused_makes_no_generation(ledger: Ledger):
    ledger.register("a", "key", wall=1.0)
    ledger.deregister("a", 1, wall=2.0)

    ledger.deregister("a", 1, wall=3.0)
    with pytest.raises(errors.UnknownWorker):
        ledger.deregister("nobody", 1, wall=3.0)

    assert ledger.generation().number == 2


def test_numbers_of_generations_grow_while_few_are_kept(ledger: Ledger):
    for _ in range(generations.KEPT + 5):
        ledger.register("a", "key", wall=1.0)

    assert ledger.generation().number == generations.KEPT + 5
    assert isinstance(ledger, sql.SqlLedger)
    with ledger._database.reading() as connection:
        kept = connection.execute(schema.generations.select()).all()
    assert len(kept) == generations.KEPT
