"""A run, its manifests, credentials, workers and generations, in every ledger."""

from dataclasses import replace
from typing import Any

import pytest

from atoll import errors
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import ManifestRecord
from atoll.ledger.tables import members, schema
from tests import ledgers
from tests.ledgers import MANIFEST, NAMES, RUN, alone, plan

# The run, its credentials and workers


def test_ledger_returns_the_run_and_manifest_it_was_given(ledger: Ledger):
    alone(ledger).run.create(RUN, MANIFEST)

    assert (alone(ledger).run.get(), alone(ledger).manifests.all()) == (RUN, [MANIFEST])


def test_new_ledger_holds_no_run(ledger: Ledger):
    assert (
        alone(ledger).run.get(),
        alone(ledger).manifests.all(),
        alone(ledger).rounds.latest(),
    ) == (None, [], None)


def test_create_run_is_refused_when_the_ledger_holds_one(started: Ledger):
    before = started.state_hash()

    with pytest.raises(errors.StoreError, match=r"already holds run 'run-1'.*'run-2'"):
        alone(started).run.create(
            replace(RUN, run_id="run-2"), replace(MANIFEST, version=2, sha256="x")
        )

    assert started.state_hash() == before


def test_control_sets_and_takes_away_names(ledger: Ledger):
    alone(ledger).control.set({"action": "pause", "kicked/a": "1"})

    alone(ledger).control.set({"kicked/a": None, "number": "2", "absent": None})

    assert alone(ledger).control.all() == {"action": "pause", "number": "2"}


def test_set_credentials_replaces_only_the_given_roles(ledger: Ledger):
    alone(ledger).credentials.set({"admin": "one", "worker": "two"})

    alone(ledger).credentials.set({"worker": "three"})

    assert alone(ledger).credentials.all() == {"admin": "one", "worker": "three"}


def test_register_gives_the_first_incarnation_to_a_new_worker(ledger: Ledger):
    record = alone(ledger).members.register("a", "key", wall=1.5)

    assert (record.incarnation, record.active, record.key_sha256) == (1, True, "key")
    assert alone(ledger).members.workers() == [record]


def test_register_again_is_the_next_incarnation_with_the_new_key(started: Ledger):
    alone(started).members.deregister("a", 1, wall=0.0)

    record = alone(started).members.register("a", "other", wall=2.5)

    assert (record.incarnation, record.active, record.key_sha256) == (2, True, "other")
    assert alone(started).members.workers()[0] == record


def test_deregister_marks_the_worker_inactive(started: Ledger):
    alone(started).members.deregister("b", 1, wall=0.0)

    assert [(w.worker_id, w.active) for w in alone(started).members.workers()] == [
        ("a", True),
        ("b", False),
        ("c", True),
    ]


def test_deregister_of_an_earlier_incarnation_is_fenced(started: Ledger):
    alone(started).members.register("a", "key a", wall=6.0)
    before = started.state_hash()

    with pytest.raises(errors.Fenced, match="incarnation 2"):
        alone(started).members.deregister("a", 1, wall=0.0)

    assert started.state_hash() == before


def test_deregister_of_an_unknown_worker_is_refused(started: Ledger):
    with pytest.raises(errors.UnknownWorker, match="'nobody'"):
        alone(started).members.deregister("nobody", 1, wall=0.0)


def test_workers_come_in_code_point_order(ledger: Ledger):
    for name in ["b", "_x", "Z.9", "a", "-dash", "B", "0"]:
        alone(ledger).members.register(name, "key", wall=0.0)

    assert [w.worker_id for w in alone(ledger).members.workers()] == NAMES


# Manifests

SECOND = ManifestRecord(version=2, sha256="8" * 64, body='{"a":"new"}', from_round=2)


def test_next_manifest_is_listed_after_the_first(started: Ledger):
    alone(started).manifests.add(SECOND)

    assert alone(started).manifests.all() == [MANIFEST, SECOND]


def test_manifest_before_the_first_round_is_in_force_from_it(ledger: Ledger):
    alone(ledger).run.create(RUN, MANIFEST)

    alone(ledger).manifests.add(replace(SECOND, from_round=1))

    assert [m.from_round for m in alone(ledger).manifests.all()] == [1, 1]


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
        alone(started).manifests.add(replace(SECOND, **changes))

    assert started.state_hash() == before


def test_manifest_of_a_ledger_without_a_run_is_refused(ledger: Ledger):
    with pytest.raises(errors.StoreError, match="does not follow version 0"):
        alone(ledger).manifests.add(replace(SECOND, version=1, from_round=1))

    assert alone(ledger).manifests.all() == []


def test_manifest_counts_from_after_a_round_that_is_only_planned(started: Ledger):
    ledgers.freeze(started, 1, plan(2, []))

    with pytest.raises(errors.StoreError, match="not planned is 3"):
        alone(started).manifests.add(SECOND)

    alone(started).manifests.add(replace(SECOND, from_round=3))


# Generations


def ranks(ledger: Ledger) -> list[tuple[int, str, int, str, int]]:
    return [
        (m.rank, m.worker_id, m.incarnation, m.ip_address, m.port)
        for m in alone(ledger).members.generation().members
    ]


def test_ledger_that_nobody_joined_is_at_generation_0(ledger: Ledger):
    assert (
        alone(ledger).members.generation().number,
        alone(ledger).members.generation().members,
    ) == (0, ())


def test_generation_has_the_active_workers_ranked_by_worker_id(ledger: Ledger):
    alone(ledger).members.register("b", "key", wall=1.0, ip_address="10.0.0.2", port=7)
    alone(ledger).members.register("a", "key", wall=2.0, ip_address="10.0.0.1", port=8)
    alone(ledger).members.register("B", "key", wall=3.0)

    assert alone(ledger).members.generation().number == 3
    assert alone(ledger).members.generation().created_wall == 3.0
    assert ranks(ledger) == [
        (0, "B", 1, "", 0),
        (1, "a", 1, "10.0.0.1", 8),
        (2, "b", 1, "10.0.0.2", 7),
    ]


def test_takeover_is_a_new_generation_at_the_new_address(ledger: Ledger):
    alone(ledger).members.register("a", "key", wall=1.0, ip_address="10.0.0.1", port=8)
    alone(ledger).members.register("b", "key", wall=1.0, ip_address="10.0.0.2", port=7)

    alone(ledger).members.register("a", "key", wall=2.0, ip_address="10.0.0.9", port=8)

    assert alone(ledger).members.generation().number == 3
    assert ranks(ledger) == [(0, "a", 2, "10.0.0.9", 8), (1, "b", 1, "10.0.0.2", 7)]


def test_leave_is_a_new_generation_in_which_the_others_are_ranked_anew(ledger: Ledger):
    alone(ledger).members.register("a", "key", wall=1.0)
    alone(ledger).members.register("b", "key", wall=1.0, ip_address="10.0.0.2", port=7)

    alone(ledger).members.deregister("a", 1, wall=2.0)

    assert alone(ledger).members.generation().number == 3
    assert ranks(ledger) == [(0, "b", 1, "10.0.0.2", 7)]


def test_leave_that_is_repeated_or_refused_makes_no_generation(ledger: Ledger):
    alone(ledger).members.register("a", "key", wall=1.0)
    alone(ledger).members.deregister("a", 1, wall=2.0)

    alone(ledger).members.deregister("a", 1, wall=3.0)
    with pytest.raises(errors.UnknownWorker):
        alone(ledger).members.deregister("nobody", 1, wall=3.0)

    assert alone(ledger).members.generation().number == 2


def test_numbers_of_generations_grow_while_few_are_kept(ledger: Ledger):
    for _ in range(members.KEPT + 5):
        alone(ledger).members.register("a", "key", wall=1.0)

    assert alone(ledger).members.generation().number == members.KEPT + 5
    with ledger.reading() as t:
        kept = t.connection.rows(schema.STATEMENTS["generations"].all)
    assert len(kept) == members.KEPT
