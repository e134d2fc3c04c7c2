"""One suite for every ledger: SQLite in a file, and PostgreSQL."""

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Barrier
from typing import Any

import pytest
from sqlalchemy import NullPool, create_engine

from atoll import errors
from atoll.ledger import connect, engines, generations, migrations, schema, sql, whole
from atoll.ledger.base import Ledger
from atoll.ledger.database import Database
from atoll.ledger.records import (
    ContributionRecord,
    DatasetRecord,
    EvaluationRecord,
    LeaseRecord,
    LeaseState,
    ManifestRecord,
    Published,
    QueueRecord,
    RoundPlan,
    RoundState,
    RunRecord,
    SnapshotRecord,
)
from tests import servers

RUN = RunRecord(run_id="run-1", created_wall=1_700_000_000.25, initial_sha256="1" * 64)
MANIFEST = ManifestRecord(version=1, sha256="2" * 64, body='{"a":"θ"}', from_round=1)
PUBLISHED = Published(
    prev_hash="3" * 64,
    hash="4" * 64,
    master_digest="5" * 64,
    published_digest="6" * 64,
    leaves=bytes(range(64)),
    published_leaves=None,
    published_wall=1_700_000_009.5,
)
# In the order of code points, which no locale gives.
NAMES = ["-dash", "0", "B", "Z.9", "_x", "a", "b"]


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(engine: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A ledger that does not exist yet."""
    if engine == "postgres":
        return str(request.getfixturevalue("postgres_url"))
    return str(tmp_path / "ledger.db")


@pytest.fixture(scope="module")
def reused(postgres_server: servers.RunningServer) -> Iterator[Database]:
    """One PostgreSQL database for all tests here that need no new one: making one is slow."""
    url = servers.create_database(postgres_server, f"ledger_{os.getpid()}")
    database = engines.open_database(url)
    migrations.migrate(database)
    yield database
    database.close()


@pytest.fixture
def ledger(engine: str, request: pytest.FixtureRequest) -> Iterator[Ledger]:
    """An open ledger without a record."""
    if engine == "postgres":
        database = request.getfixturevalue("reused")
        empty(database)
        yield sql.SqlLedger(database)
    else:
        # In memory where there is such a directory: these tests wait for thousands of syncs.
        with TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as where:
            opened = engines.open_ledger(Path(where) / "ledger.db")
            yield opened
            opened.close()


def empty(database: Database) -> None:
    with database.writing() as connection:
        for table in reversed(schema.metadata.sorted_tables):
            if table is not schema.schema_version:
                connection.execute(table.delete())


def open_over(database: Database) -> Ledger:
    migrations.migrate(database)
    return sql.SqlLedger(database)


@pytest.fixture
def started(ledger: Ledger) -> Ledger:
    """Round 1 open: `a` has rows 0-8, `b` has rows 8-16, `c` is registered without a lease."""
    ledger.create_run(RUN, MANIFEST)
    for name in "abc":
        ledger.register(name, f"key {name}", wall=5.0)
    ledger.begin(plan(1, [lease(1, "a", 0, 8), lease(1, "b", 8, 16)]))
    return ledger


def lease(round_number: int, worker_id: str, start: int, stop: int) -> LeaseRecord:
    return LeaseRecord(round=round_number, worker_id=worker_id, start=start, stop=stop)


def extension(
    round_number: int, leases: list[LeaseRecord], *, cursor: int, taken: list[LeaseRecord]
) -> RoundPlan:
    return RoundPlan(
        round=round_number,
        manifest_sha256=MANIFEST.sha256,
        cursor=cursor,
        leases=tuple(leases),
        taken=tuple(taken),
    )


def plan(
    round_number: int, leases: list[LeaseRecord], *, taken: tuple[LeaseRecord, ...] = ()
) -> RoundPlan:
    return RoundPlan(
        round=round_number,
        manifest_sha256=MANIFEST.sha256,
        cursor=16 * round_number,
        leases=tuple(leases),
        taken=taken,
    )


def contribution(worker_id: str = "a", **changes: object) -> ContributionRecord:
    record = ContributionRecord(
        round=1,
        worker_id=worker_id,
        incarnation=1,
        sha256=f"blob of {worker_id}",
        nbytes=2**40,
        weight=1,
        rows=8,
        tokens=2**33,
        loss_sum=0.1 + 0.2,
        norm=1e-310,
        receipt=f"receipt of {worker_id}",
        accepted_wall=1_700_000_001.0,
    )
    return replace(record, **changes)  # type: ignore[arg-type]


def play(ledger: Ledger) -> None:
    """A history that leaves rows in every table and leases in every state."""
    ledger.create_run(RUN, MANIFEST)
    ledger.set_credentials({"worker": "w" * 64, "admin": "a" * 64})
    for name in NAMES:
        ledger.register(name, f"key {name}", wall=-0.0)
    ledger.register("B", "new key", wall=7.125)
    ledger.deregister("b", 1, wall=0.0)
    ledger.begin(plan(1, [lease(1, name, 8 * n, 8 * n + 8) for n, name in enumerate(NAMES)]))
    ledger.accept(contribution("a"))
    ledger.accept(contribution("B", incarnation=2))
    ledger.freeze(1, plan(2, [lease(2, "a", 0, 8)], taken=(lease(1, "-dash", 0, 8),)))
    ledger.publish(1, PUBLISHED)
    ledger.extend(extension(2, [lease(2, "B", 100, 108)], cursor=108, taken=[]))
    ledger.accept(contribution("a", round=2))
    ledger.freeze(2, None)
    ledger.publish(2, replace(PUBLISHED, published_leaves=b"\x00\xff"))
    ledger.add_snapshot(SnapshotRecord(0, "m", "p", ()))
    ledger.add_snapshot(SnapshotRecord(2, "m2", "p2", (("momentum", "s1"), ("a", "s2"))))
    ledger.add_evaluation(EvaluationRecord(1, "a", 2.0 / 3.0, 10))
    ledger.set_control({"action": "pause", "number": "1"})
    ledger.add_datasets([DatasetRecord("d" * 16, "words", 2**40, 3)])
    queue = QueueRecord("d" * 16, 2**62, 0, 2**40, units=1000)
    units = replace(lease(3, "a", 2**39, 2**40), dataset_id="d" * 16, shuffle_seed=2**62, unit=500)
    ledger.begin(replace(plan(3, [units]), queues=(queue,)))
    ledger.accept(contribution("a", round=3))


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


# Rounds and leases


def test_begin_opens_the_first_round_with_its_leases(started: Ledger):
    latest = started.latest_round()

    assert latest is not None
    assert (latest.round, latest.state, latest.cursor) == (1, RoundState.OPEN, 16)
    assert started.leases(1) == [lease(1, "a", 0, 8), lease(1, "b", 8, 16)]


def test_begin_is_refused_when_a_round_exists(started: Ledger):
    before = started.state_hash()

    with pytest.raises(errors.StoreError, match="rounds up to 1"):
        started.begin(plan(2, []))

    assert started.state_hash() == before


def test_begin_is_refused_for_another_round_than_the_first(ledger: Ledger):
    ledger.create_run(RUN, MANIFEST)

    with pytest.raises(errors.WrongRound, match="round 2"):
        ledger.begin(plan(2, []))

    assert ledger.latest_round() is None


def test_round_after_the_last_published_one_can_be_begun(started: Ledger):
    """A run that had ended goes on."""
    started.freeze(1, None)
    started.publish(1, PUBLISHED)

    started.begin(plan(2, [lease(2, "a", 16, 24)]))

    latest = started.latest_round()
    assert latest is not None
    assert (latest.round, latest.state) == (2, RoundState.OPEN)
    assert started.leases(2) == [lease(2, "a", 16, 24)]


def test_begin_is_refused_while_the_last_round_is_frozen(started: Ledger):
    started.freeze(1, None)
    before = started.state_hash()

    with pytest.raises(errors.StoreError, match="which is frozen"):
        started.begin(plan(2, []))

    assert started.state_hash() == before


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


def test_leases_come_in_worker_then_start_order(started: Ledger):
    started.extend(extension(1, [lease(1, "b", 3, 4), lease(1, "a", 90, 91)], cursor=91, taken=[]))

    found = [(le.worker_id, le.start) for le in started.leases(1)]
    assert found == [("a", 0), ("a", 90), ("b", 3), ("b", 8)]


def test_extend_adds_leases_to_the_open_round_and_moves_its_cursor(started: Ledger):
    started.extend(extension(1, [lease(1, "c", 16, 24)], cursor=24, taken=[]))

    assert started.leases(1)[-1] == lease(1, "c", 16, 24)
    assert [r.cursor for r in started.rounds()] == [24]


def test_extend_adds_leases_to_the_planned_round_when_there_is_one(started: Ledger):
    started.freeze(1, plan(2, []))

    started.extend(extension(2, [lease(2, "c", 8, 16)], cursor=48, taken=[lease(1, "b", 8, 16)]))

    assert started.leases(2) == [lease(2, "c", 8, 16)]
    assert [r.cursor for r in started.rounds()] == [16, 48]
    assert started.reopened() == [replace(lease(1, "a", 0, 8), state=LeaseState.REOPENED)]


def freeze_last(ledger: Ledger) -> None:
    ledger.freeze(1, None)


def publish_last(ledger: Ledger) -> None:
    ledger.freeze(1, None)
    ledger.publish(1, PUBLISHED)


@pytest.mark.parametrize("move", [freeze_last, publish_last])
def test_extend_is_refused_when_the_latest_round_is_closed(
    started: Ledger, move: Callable[[Ledger], None]
):
    move(started)
    before = started.state_hash()

    with pytest.raises(errors.WrongRound, match=r"round 1 is (frozen|published)"):
        started.extend(extension(1, [lease(1, "c", 16, 24)], cursor=24, taken=[]))

    assert started.state_hash() == before


def test_extend_is_refused_when_no_round_has_begun(ledger: Ledger):
    with pytest.raises(errors.WrongRound, match="no round has begun"):
        ledger.extend(extension(1, [], cursor=0, taken=[]))


@pytest.mark.parametrize(
    "bad",
    [
        lease(2, "c", 16, 24),  # another round
        lease(1, "c", 24, 24),  # no row
        lease(1, "c", -1, 24),
        lease(1, "nobody", 16, 24),
        lease(1, "a", 0, 8),  # twice
        replace(lease(1, "c", 16, 24), state=LeaseState.DONE),
    ],
)
def test_extend_with_a_lease_that_breaks_a_rule_changes_nothing(started: Ledger, bad: LeaseRecord):
    before = started.state_hash()

    with pytest.raises(errors.StoreError):
        started.extend(extension(1, [lease(1, "b", 99, 100), bad], cursor=24, taken=[]))

    assert started.state_hash() == before


def test_extend_is_refused_when_a_taken_lease_is_not_reopened(started: Ledger):
    before = started.state_hash()

    with pytest.raises(errors.StoreError, match="not among the reopened"):
        started.extend(
            extension(1, [lease(1, "c", 8, 16)], cursor=24, taken=[lease(1, "b", 8, 16)])
        )

    assert started.state_hash() == before


def test_rounds_are_cut_by_first_and_last(started: Ledger):
    for number in (1, 2, 3):
        started.freeze(number, plan(number + 1, []))
        started.publish(number, PUBLISHED)

    assert [r.round for r in started.rounds(first=2, last=3)] == [2, 3]


# Accepting


def test_accept_records_the_contribution_and_marks_its_leases_done(started: Ledger):
    accepted = started.accept(contribution("a"))

    assert accepted == contribution("a")
    assert started.contributions(1) == [contribution("a")]
    assert [le.state for le in started.leases(1)] == [LeaseState.DONE, LeaseState.LEASED]


def test_contributions_come_in_code_point_order(ledger: Ledger):
    play(ledger)

    assert [c.worker_id for c in ledger.contributions(1)] == ["B", "a"]


def test_tokens_are_counted_once_their_round_is_frozen(started: Ledger):
    assert started.counted_tokens() == 0
    started.accept(contribution("a"))
    started.accept(contribution("b"))
    while_open = started.counted_tokens()

    started.freeze(1, None)
    frozen = started.counted_tokens()
    started.publish(1, PUBLISHED)

    assert (while_open, frozen, started.counted_tokens()) == (0, 2**34, 2**34)


def test_accepted_blobs_are_those_of_a_round_and_later_ones(started: Ledger):
    started.accept(contribution("a"))
    started.freeze(1, plan(2, [lease(2, "a", 16, 24)]))
    started.publish(1, PUBLISHED)
    started.accept(contribution("a", round=2, sha256="blob of round 2"))

    assert started.accepted_blobs() == {"blob of a", "blob of round 2"}
    assert started.accepted_blobs(first=2) == {"blob of round 2"}
    assert started.accepted_blobs(first=3) == set()


def test_accept_of_the_same_bytes_returns_the_first_record(started: Ledger):
    first = started.accept(contribution("a"))
    before = started.state_hash()

    again = started.accept(contribution("a", receipt="other", accepted_wall=9.0, norm=2.0))

    assert again == first
    assert started.state_hash() == before


@pytest.mark.parametrize("move", [freeze_last, publish_last])
def test_accept_of_the_same_bytes_returns_the_first_record_when_the_round_is_closed(
    started: Ledger, move: Callable[[Ledger], None]
):
    first = started.accept(contribution("a"))
    move(started)

    assert started.accept(contribution("a", receipt="other")) == first


def test_accept_returns_the_first_record_to_a_later_incarnation(started: Ledger):
    first = started.accept(contribution("a"))
    started.register("a", "key a", wall=6.0)

    assert started.accept(contribution("a", incarnation=2)) == first


def open_round(ledger: Ledger) -> None:
    pass


def plan_second(ledger: Ledger) -> None:
    ledger.freeze(1, plan(2, [lease(2, "a", 16, 24)]))


def take_over(ledger: Ledger) -> None:
    ledger.register("a", "key a", wall=6.0)


def accept_a(ledger: Ledger) -> None:
    ledger.accept(contribution("a"))


def accept_a_then_publish(ledger: Ledger) -> None:
    accept_a(ledger)
    publish_last(ledger)


def accept_a_then_take_over(ledger: Ledger) -> None:
    accept_a(ledger)
    take_over(ledger)


REFUSALS = [
    (open_round, contribution("nobody"), errors.UnknownWorker),
    (open_round, contribution("nobody", round=9, incarnation=7), errors.UnknownWorker),
    (take_over, contribution("a"), errors.Fenced),
    (take_over, contribution("a", round=9), errors.Fenced),
    (open_round, contribution("a", incarnation=2), errors.Fenced),
    (accept_a_then_take_over, contribution("a"), errors.Fenced),
    (open_round, contribution("a", round=9), errors.WrongRound),
    (open_round, contribution("a", round=0), errors.WrongRound),
    (accept_a, contribution("a", sha256="other"), errors.Conflict),
    (accept_a_then_publish, contribution("a", sha256="other"), errors.Conflict),
    (freeze_last, contribution("a"), errors.StaleContribution),
    (publish_last, contribution("a"), errors.StaleContribution),
    (publish_last, contribution("c"), errors.StaleContribution),
    (plan_second, contribution("a", round=2), errors.WrongRound),
    (plan_second, contribution("c", round=2), errors.WrongRound),
    (open_round, contribution("c"), errors.LeaseLost),
    (open_round, contribution("a", norm=float("nan")), errors.StoreError),
    (open_round, contribution("a", loss_sum=float("inf")), errors.StoreError),
    (open_round, contribution("a", tokens=2**70), errors.StoreError),
]


@pytest.mark.parametrize(("move", "refused", "error"), REFUSALS)
def test_accept_refuses_with_the_first_rule_that_is_broken_and_changes_nothing(
    started: Ledger,
    move: Callable[[Ledger], None],
    refused: ContributionRecord,
    error: type[errors.AtollError],
):
    move(started)
    before = started.state_hash()

    with pytest.raises(errors.AtollError) as caught:
        started.accept(refused)

    assert type(caught.value) is error
    assert started.state_hash() == before


def test_accept_of_one_contribution_from_two_threads_records_it_once(started: Ledger):
    both = Barrier(2)

    def send(receipt: str) -> ContributionRecord:
        both.wait()
        return started.accept(contribution("a", receipt=receipt))

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(send, ["one", "two"])

    assert first == second
    assert started.contributions(1) == [first]


def test_accept_racing_with_freeze_is_in_the_frozen_list_or_stale(started: Ledger):
    both = Barrier(2)

    def send() -> list[str]:
        both.wait()
        try:
            return [started.accept(contribution("a")).worker_id]
        except errors.StaleContribution:
            return []

    def freeze() -> list[str]:
        both.wait()
        return [c.worker_id for c in started.freeze(1, None)]

    with ThreadPoolExecutor(2) as pool:
        sent, frozen = pool.submit(send), pool.submit(freeze)

    assert sent.result() == frozen.result()
    assert [c.worker_id for c in started.contributions(1)] == frozen.result()


# Closing


def test_freeze_returns_the_contributions_in_order_and_reopens_the_other_leases(started: Ledger):
    started.extend(extension(1, [lease(1, "c", 16, 24)], cursor=24, taken=[]))
    started.accept(contribution("c"))
    started.accept(contribution("a"))

    frozen = started.freeze(1, None)

    assert frozen == [contribution("a"), contribution("c")]
    assert [le.state for le in started.leases(1)] == [
        LeaseState.DONE,
        LeaseState.REOPENED,
        LeaseState.DONE,
    ]
    assert [r.state for r in started.rounds()] == [RoundState.FROZEN]


def test_freeze_reopens_a_lease_that_was_added_after_its_worker_contributed(started: Ledger):
    started.accept(contribution("a"))
    late = lease(1, "a", 16, 24)
    started.extend(extension(1, [late], cursor=24, taken=[]))

    started.freeze(1, None)

    assert replace(late, state=LeaseState.REOPENED) in started.reopened()


def test_freeze_plans_the_next_round_with_the_rows_that_this_one_lost(started: Ledger):
    started.accept(contribution("a"))

    started.freeze(1, plan(2, [lease(2, "a", 8, 16)], taken=(lease(1, "b", 8, 16),)))

    assert [r.state for r in started.rounds()] == [RoundState.FROZEN, RoundState.PLANNED]
    assert [le.state for le in started.leases(1)] == [LeaseState.DONE, LeaseState.TAKEN]
    assert started.leases(2) == [lease(2, "a", 8, 16)]
    assert started.reopened() == []


def test_reopened_leases_come_by_round_then_start(started: Ledger):
    started.freeze(1, plan(2, [lease(2, "c", 0, 4), lease(2, "a", 4, 8)]))
    started.publish(1, PUBLISHED)
    started.freeze(2, None)

    found = [(le.round, le.start) for le in started.reopened()]
    assert found == [(1, 0), (1, 8), (2, 0), (2, 4)]


FREEZE_REFUSALS = [
    (open_round, 2, None),
    (freeze_last, 1, None),
    (publish_last, 1, None),
    (plan_second, 2, None),
    (open_round, 1, plan(3, [])),
]


@pytest.mark.parametrize(("move", "number", "next_plan"), FREEZE_REFUSALS)
def test_freeze_is_refused_unless_open_and_followed_by_the_next_round(
    started: Ledger,
    move: Callable[[Ledger], None],
    number: int,
    next_plan: RoundPlan | None,
):
    move(started)
    before = started.state_hash()

    with pytest.raises(errors.WrongRound, match="round"):
        started.freeze(number, next_plan)

    assert started.state_hash() == before


FAULTY_PLANS = [
    plan(2, [lease(2, "nobody", 16, 24)]),
    plan(2, [lease(1, "a", 16, 24)]),
    plan(2, [lease(2, "a", 16, 24)], taken=(lease(1, "c", 0, 8),)),
    plan(2, [lease(2, "a", 16, 24)], taken=(lease(1, "b", 8, 17),)),
    plan(2, [], taken=(lease(1, "b", 8, 16), lease(1, "b", 8, 16))),
    replace(plan(2, []), manifest_sha256="unknown"),
]


@pytest.mark.parametrize("faulty", FAULTY_PLANS)
def test_freeze_with_a_plan_that_breaks_a_rule_leaves_the_round_open(
    started: Ledger, faulty: RoundPlan
):
    before = started.state_hash()

    with pytest.raises(errors.StoreError):
        started.freeze(1, faulty)

    assert started.state_hash() == before


def test_publish_records_the_digests_and_opens_the_planned_round(started: Ledger):
    plan_second(started)

    started.publish(1, PUBLISHED)

    first, second = started.rounds()
    assert first.state is RoundState.PUBLISHED
    assert {f.name: getattr(first, f.name) for f in fields(PUBLISHED)} == {
        f.name: getattr(PUBLISHED, f.name) for f in fields(PUBLISHED)
    }
    assert second.state is RoundState.OPEN
    assert second.hash is None


@pytest.mark.parametrize(
    ("move", "number"), [(open_round, 1), (publish_last, 1), (plan_second, 2), (freeze_last, 2)]
)
def test_publish_is_refused_unless_the_round_is_frozen(
    started: Ledger, move: Callable[[Ledger], None], number: int
):
    move(started)
    before = started.state_hash()

    with pytest.raises(errors.WrongRound, match=f"round {number} is"):
        started.publish(number, PUBLISHED)

    assert started.state_hash() == before


# Snapshots and evaluations


def test_snapshots_come_oldest_first_with_their_slots_in_order(ledger: Ledger):
    old = SnapshotRecord(3, "m", "p", ())
    new = SnapshotRecord(10, "m", "p", (("z", "s1"), ("a", "s2")))
    ledger.add_snapshot(new)
    ledger.add_snapshot(old)

    assert ledger.snapshots() == [old, new]


def test_drop_snapshots_keeps_the_named_version(ledger: Ledger):
    for version in (1, 2, 3):
        ledger.add_snapshot(SnapshotRecord(version, "m", "p", ()))

    ledger.drop_snapshots(below_version=2)

    assert [s.version for s in ledger.snapshots()] == [2, 3]


def test_add_snapshot_again_changes_nothing(ledger: Ledger):
    snapshot = SnapshotRecord(1, "m", "p", (("z", "s"),))
    ledger.add_snapshot(snapshot)

    ledger.add_snapshot(snapshot)

    assert ledger.snapshots() == [snapshot]


def test_add_snapshot_refuses_other_blobs_of_the_same_version(ledger: Ledger):
    ledger.add_snapshot(SnapshotRecord(1, "m", "p", ()))

    with pytest.raises(errors.StoreError, match="'other'"):
        ledger.add_snapshot(SnapshotRecord(1, "other", "p", ()))


def test_first_evaluation_of_a_version_by_a_worker_stands(started: Ledger):
    first = EvaluationRecord(1, "a", 2.5, 10)
    started.add_evaluation(first)

    started.add_evaluation(EvaluationRecord(1, "a", 9.5, 99))

    assert started.evaluations() == [first]


def test_evaluations_come_by_version_then_worker(started: Ledger):
    for version, name in [(10, "a"), (2, "b"), (2, "a")]:
        started.add_evaluation(EvaluationRecord(version, name, 1.0, 1))

    found = [(e.version, e.worker_id) for e in started.evaluations()]
    assert found == [(2, "a"), (2, "b"), (10, "a")]


def test_evaluation_by_an_unknown_worker_is_refused(started: Ledger):
    with pytest.raises(errors.UnknownWorker, match="'nobody'"):
        started.add_evaluation(EvaluationRecord(1, "nobody", 1.0, 1))


# The whole


def test_ledger_has_the_same_state_when_opened_again(url: str):
    first = engines.open_ledger(url)
    play(first)
    before = first.state_hash()
    first.close()

    again = engines.open_ledger(url)

    assert again.state_hash() == before
    again.close()


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


# Changes only with the history above or with the tables; every engine must give this same value.
STATE_OF_PLAY = "ebad6d67aaf22fa888fe4e9682ead483b5a20c5aa54f861ecacaeb0bd438bd4a"


def test_state_hash_of_one_history_is_the_same_on_every_engine(ledger: Ledger):
    play(ledger)

    assert ledger.state_hash() == STATE_OF_PLAY


def test_play_leaves_rows_in_every_table(url: str):
    ledger = engines.open_ledger(url)
    play(ledger)
    ledger.close()

    database = engines.open_database(url)
    with database.reading() as connection:
        counts = {
            name: len(connection.execute(table.select()).all())
            for name, table in schema.metadata.tables.items()
        }
    database.close()

    assert min(counts.values()) > 0, counts


ONE_MORE = [
    lambda ledger: ledger.set_credentials({"worker": "x"}),
    lambda ledger: ledger.register("new", "key", wall=0.0),
    lambda ledger: ledger.deregister("a", 1, wall=0.0),
    lambda ledger: ledger.drop_snapshots(below_version=1),
    lambda ledger: ledger.add_snapshot(SnapshotRecord(9, "m", "p", ())),
    lambda ledger: ledger.add_evaluation(EvaluationRecord(9, "a", 0.0, 1)),
]


@pytest.mark.parametrize("change", ONE_MORE)
def test_state_hash_differs_after_any_change(ledger: Ledger, change: Callable[[Ledger], None]):
    play(ledger)

    change(ledger)

    assert ledger.state_hash() != STATE_OF_PLAY


def test_copy_opens_as_a_ledger_with_the_same_state(ledger: Ledger, tmp_path: Path):
    play(ledger)
    path = tmp_path / "copy.db"

    ledger.copy_to(str(path))

    copied = engines.open_ledger(path)
    assert copied.state_hash() == ledger.state_hash()
    assert copied.damage() == []
    copied.close()


def test_copy_to_an_existing_file_is_refused_and_leaves_it_alone(ledger: Ledger, tmp_path: Path):
    path = tmp_path / "taken.db"
    path.write_bytes(b"precious")

    with pytest.raises(errors.StoreError, match=r"taken\.db"):
        ledger.copy_to(str(path))

    assert path.read_bytes() == b"precious"


def test_copy_into_an_absent_directory_is_refused_by_name(ledger: Ledger, tmp_path: Path):
    with pytest.raises(errors.StoreError, match="absent"):
        ledger.copy_to(str(tmp_path / "absent" / "copy.db"))


def break_disk(*_: object) -> None:
    raise OSError(5, "Input/output error")


def test_copy_that_breaks_off_leaves_no_file(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # The last thing that each engine's copy does: no real disk fails on request.
    monkeypatch.setattr(whole, "_sync", break_disk)
    monkeypatch.setattr(whole, "_copy_table", break_disk)

    with pytest.raises(errors.StoreError, match=r"copy\.db.*Input/output error"):
        ledger.copy_to(str(tmp_path / "copy.db"))

    assert list(tmp_path.iterdir()) == []


def test_closed_ledger_refuses_every_call(url: str):
    ledger = engines.open_ledger(url)
    ledger.close()
    ledger.close()

    with pytest.raises(errors.StoreError, match="is closed"):
        ledger.run()


def test_second_opener_is_refused_while_the_ledger_is_held(url: str):
    holder = engines.open_ledger(url)

    with pytest.raises(errors.StateHeld, match="is held by"):
        engines.open_ledger(url)

    holder.close()


# What only one engine has


def test_sqlite_connection_is_durable_exclusive_and_checks_foreign_keys(tmp_path: Path):
    database = connect.sqlite(str(tmp_path / "ledger.db"))
    names = ["journal_mode", "synchronous", "foreign_keys", "locking_mode", "trusted_schema"]

    with database.bare() as connection:
        found = [connection.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in names]

    assert found == ["wal", 2, 1, "exclusive", 0]
    database.close()


def test_memory_ledger_gives_the_same_state():
    ledger = engines.open_ledger(":memory:")
    play(ledger)

    assert ledger.state_hash() == STATE_OF_PLAY
    ledger.close()


def test_sqlite_url_names_the_same_ledger_as_its_path(tmp_path: Path):
    path = tmp_path / "ledger.db"
    by_url = engines.open_ledger(f"sqlite:///{path}")
    by_url.create_run(RUN, MANIFEST)
    by_url.close()

    by_path = engines.open_ledger(path)

    assert by_path.run() == RUN
    by_path.close()


def test_sqlite_ledger_works_with_the_standard_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "pysqlite3", None)
    ledger = engines.open_ledger(tmp_path / "ledger.db")
    play(ledger)

    assert ledger.state_hash() == STATE_OF_PLAY
    ledger.close()


def test_full_disk_is_storage_full_and_the_ledger_goes_on_afterwards(tmp_path: Path):
    database = connect.sqlite(str(tmp_path / "ledger.db"))
    ledger = open_over(database)
    ledger.create_run(RUN, MANIFEST)
    before = ledger.state_hash()
    set_page_limit(database, pages=1)  # SQLite raises it to what the file has already

    with pytest.raises(errors.StorageFull, match="free some space"):
        ledger.set_credentials({"admin": "x" * 100_000})

    assert ledger.state_hash() == before
    set_page_limit(database, pages=1000)
    ledger.set_credentials({"admin": "x" * 100_000})
    assert ledger.credentials() == {"admin": "x" * 100_000}
    ledger.close()


def set_page_limit(database: Database, *, pages: int) -> None:
    with database.bare() as connection:
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}").close()


def test_file_that_is_no_database_is_refused_by_name(tmp_path: Path):
    path = tmp_path / "ledger.db"
    path.write_bytes(b"not a database, " * 100)

    with pytest.raises(errors.StateDamaged, match=r"ledger\.db"):
        engines.open_ledger(path)


def test_absent_directory_is_refused_by_name(tmp_path: Path):
    with pytest.raises(errors.StoreError, match=r"absent.*directory that does not exist"):
        engines.open_ledger(tmp_path / "absent" / "ledger.db")


def test_unknown_engine_is_refused_without_repeating_the_password():
    with pytest.raises(errors.ConfigError, match="'mysql'") as caught:
        engines.open_ledger("mysql://user:secret@host/db")

    assert "secret" not in str(caught.value)


def test_unreachable_server_is_a_store_error_without_the_password():
    with pytest.raises(errors.StoreError, match="Connection refused") as caught:
        engines.open_ledger("postgresql://user:secret@127.0.0.1:1/db?password=secret")

    assert "secret" not in str(caught.value)


def test_postgres_without_psycopg_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)

    with pytest.raises(errors.StoreError, match=r"pip install 'atoll\[postgres\]'"):
        engines.open_ledger("postgresql://127.0.0.1/db")


@pytest.mark.postgres
def test_postgres_names_the_process_that_holds_the_ledger(postgres_url: str):
    ledger = engines.open_ledger(postgres_url)

    with pytest.raises(errors.StateHeld, match=rf"'atoll pid {os.getpid()} on "):
        engines.open_ledger(postgres_url)

    ledger.close()


@pytest.mark.postgres
def test_postgres_ledger_stays_refused_when_its_session_was_ended(postgres_url: str):
    ledger = engines.open_ledger(postgres_url)
    end_sessions(postgres_url)
    with pytest.raises(errors.StoreError, match=r"connection .* was lost"):
        ledger.register("a", "key", wall=0.0)

    with pytest.raises(errors.StoreError, match="restart this process"):
        ledger.register("a", "key", wall=0.0)

    ledger.close()


def end_sessions(url: str) -> None:
    with create_engine(url, poolclass=NullPool).connect() as connection:
        connection.exec_driver_sql(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


@pytest.mark.postgres
def test_postgres_sorts_every_text_column_by_code_point(postgres_url: str):
    engines.open_ledger(postgres_url).close()

    database = engines.open_database(postgres_url)
    with database.reading() as connection:
        collations = connection.exec_driver_sql(
            "SELECT DISTINCT collation_name FROM information_schema.columns "
            "WHERE table_schema = 'public' AND data_type = 'text'"
        ).all()
    database.close()

    assert [tuple(row) for row in collations] == [("C",)]
