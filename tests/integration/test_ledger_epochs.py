"""A PostgreSQL ledger has one writer at a time: leases by the database's clock, and epochs."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Connection, NullPool, create_engine, text

from atoll.blobs.fenced import FencedBlobs
from atoll.blobs.memory import MemoryBlobs
from atoll.errors import (
    AtollError,
    StateHeld,
    StoreAway,
    StoreError,
    Superseded,
    WrongRound,
)
from atoll.ledger import engines
from atoll.ledger.ledger import Ledger
from atoll.ledger.postgres import epochs
from atoll.ledger.records import (
    DatasetRecord,
    EvaluationRecord,
    LeaseRecord,
    ManifestRecord,
    Published,
    RoundPlan,
    RunRecord,
    SnapshotRecord,
)
from tests import ledgers, processes, served
from tests.ledgers import alone, state_hash

pytestmark = pytest.mark.postgres

RUN = RunRecord("run-1", 1.0, "1" * 64)
MANIFEST = ManifestRecord(1, "2" * 64, "{}", from_round=1)
NEXT = ManifestRecord(2, "3" * 64, "{2}", from_round=2)
PUBLISHED = Published("4" * 64, "5" * 64, "6" * 64, "7" * 64, b"", None, 2.0)
WORDS = DatasetRecord("a" * 16, "words", 20, 1)
CONTRIBUTION = ledgers.contribution("a")


def plan(number: int, worker_id: str = "a") -> RoundPlan:
    first = 8 * number
    lease = LeaseRecord(number, worker_id, first, first + 8)
    return RoundPlan(number, MANIFEST.sha256, first + 8, (lease,))


# What writes; that nothing else does, reading transactions see to.
WRITES: dict[str, Callable[[Ledger], object]] = {
    "create_run": lambda ledger: alone(ledger).run.create(RUN, MANIFEST),
    "add_manifest": lambda ledger: alone(ledger).manifests.add(NEXT),
    "set_credentials": lambda ledger: alone(ledger).credentials.set({"worker": "9" * 64}),
    "register": lambda ledger: alone(ledger).members.register("late", "key", wall=3.0),
    "deregister": lambda ledger: alone(ledger).members.deregister("a", 1, wall=3.0),
    "set_control": lambda ledger: alone(ledger).control.set({"command": "stop"}),
    "add_datasets": lambda ledger: alone(ledger).datasets.add([WORDS]),
    "begin": lambda ledger: ledgers.begin(ledger, plan(2)),
    "extend": lambda ledger: alone(ledger).rounds.extend(plan(1, "b")),
    "accept": lambda ledger: alone(ledger).contributions.accept(CONTRIBUTION),
    "expire": lambda ledger: alone(ledger).rounds.expire(1, ["b"]),
    "freeze": lambda ledger: ledgers.freeze(ledger, 1, plan(2)),
    "publish": lambda ledger: ledgers.publish(ledger, 1, PUBLISHED),
    "add_snapshot": lambda ledger: alone(ledger).snapshots.add(SnapshotRecord(1, "a", "b", ())),
    "drop_snapshots": lambda ledger: alone(ledger).snapshots.drop_below(9),
    "add_evaluation": lambda ledger: alone(ledger).evaluations.add(
        EvaluationRecord(1, "a", 1.0, 1)
    ),
    "check_held": lambda ledger: ledger.check_held(),
}


def look(url: str) -> Connection:
    """A connection that holds nothing."""
    return create_engine(url, poolclass=NullPool).connect()


def fall_silent(url: str) -> None:
    """As if the holder had not renewed its lease for a day; it learns nothing of it."""
    with look(url) as connection, connection.begin():
        connection.execute(text("UPDATE holder SET renewed = renewed - interval '1 day'"))


def prepare(ledger: Ledger) -> None:
    alone(ledger).run.create(RUN, MANIFEST)
    for name in "ab":
        alone(ledger).members.register(name, f"key {name}", wall=1.0)
    ledgers.begin(ledger, plan(1))


@pytest.fixture
def stale(postgres_url: str) -> Iterator[Ledger]:
    """A holder whose ledger was taken over by a session that still has it."""
    first = engines.open_ledger(postgres_url)
    prepare(first)
    fall_silent(postgres_url)
    second = engines.open_ledger(postgres_url)
    yield first
    first.close()
    second.close()


def test_no_write_of_a_stale_holder_reaches_the_ledger(stale: Ledger, postgres_url: str) -> None:
    before = state_hash(postgres_url)

    for name, write in WRITES.items():
        with pytest.raises(Superseded, match=r"was taken over .* epoch 2; .* held epoch 1 "):
            write(stale)
        assert state_hash(postgres_url) == before, name


def test_every_write_changes_a_ledger_that_is_held_or_is_refused_for_itself(
    postgres_url: str,
) -> None:
    """The control of the test above: what was fenced there would have got through."""
    ledger = engines.open_ledger(postgres_url)
    prepare(ledger)
    changed = set()
    for name, write in WRITES.items():
        before = state_hash(postgres_url)
        with contextlib.suppress(WrongRound, StoreError):
            write(ledger)
        if state_hash(postgres_url) != before:
            changed.add(name)
    ledger.close()

    assert changed >= {
        "register", "set_control", "add_datasets", "extend", "accept", "expire", "freeze",
        "publish", "add_snapshot",
    }  # fmt: skip


def test_stale_holder_without_its_check_would_write(
    stale: Ledger, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = state_hash(postgres_url)
    monkeypatch.setattr(epochs.Epoch, "check", lambda *_: None)

    WRITES["register"](stale)

    assert state_hash(postgres_url) != before


def test_live_lease_is_refused_by_its_holder(postgres_url: str) -> None:
    ledger = engines.open_ledger(postgres_url)

    with pytest.raises(StateHeld, match=rf"'atoll pid {os.getpid()} on .* epoch 1, heard .*15 s"):
        engines.open_ledger(postgres_url)

    ledger.check_held()
    ledger.close()


def test_ledger_of_a_session_that_ended_is_taken_at_once(postgres_url: str) -> None:
    engines.open_ledger(postgres_url, lease_seconds=3600.0).close()

    again = engines.open_ledger(postgres_url)

    with look(postgres_url) as connection:
        assert connection.execute(text("SELECT epoch FROM holder")).scalar_one() == 2
    again.close()


def test_renewal_keeps_a_lease_alive(postgres_url: str) -> None:
    ledger = engines.open_ledger(postgres_url, lease_seconds=1.0)
    fall_silent(postgres_url)

    def renewed() -> bool:
        with look(postgres_url) as connection:
            row = connection.execute(text("SELECT clock_timestamp() - renewed FROM holder"))
            return bool(row.scalar_one().days < 1)

    processes.eventually("a renewal", renewed)
    ledger.close()


def test_stale_holder_hears_of_the_take_over_without_writing(postgres_url: str) -> None:
    heard: list[AtollError] = []
    told = threading.Event()
    first = engines.open_ledger(postgres_url, lease_seconds=1.0)

    def tell(error: AtollError) -> None:
        heard.append(error)
        told.set()

    first.on_lost(tell)
    with look(postgres_url) as connection, connection.begin():
        connection.execute(text("UPDATE holder SET epoch = 7, holder = 'another'"))

    assert told.wait(processes.LIMIT_SECONDS)
    assert isinstance(heard[0], Superseded)
    assert "'another'" in str(heard[0])
    first.close()
    assert len(heard) == 1


def test_holder_inside_a_transaction_is_waited_for_no_longer_than_its_lease(
    postgres_url: str,
) -> None:
    """The server ends the session that keeps a take-over waiting; nothing of it is recorded."""
    database = engines.open_database(postgres_url, lease_seconds=1.0)
    taken: list[Ledger] = []

    def take_over() -> None:
        fall_silent(postgres_url)
        taken.append(engines.open_ledger(postgres_url))

    def stand_still_in_a_transaction() -> None:
        with database.writing() as connection:
            connection.change("CREATE TABLE late (id BIGINT)")
            other = threading.Thread(target=take_over)
            other.start()
            other.join(processes.LIMIT_SECONDS)

    with pytest.raises(StoreError):
        stand_still_in_a_transaction()
    with pytest.raises(Superseded, match="epoch 2"), database.writing():
        pass
    with look(postgres_url) as connection:
        assert connection.execute(text("SELECT to_regclass('late')")).scalar_one() is None
    taken[0].close()
    database.close()


def test_holder_that_renews_while_a_take_over_waits_keeps_the_ledger(postgres_url: str) -> None:
    database = engines.open_database(postgres_url)
    outcome: list[AtollError | Ledger] = []

    def take_over() -> None:
        try:
            outcome.append(engines.open_ledger(postgres_url))
        except AtollError as error:
            outcome.append(error)

    def waits() -> bool:
        with look(postgres_url) as connection:
            waiting = text(
                "SELECT count(*) FROM pg_locks WHERE mode = 'ExclusiveLock' AND "
                "locktype = 'relation' AND NOT granted"
            )
            return bool(connection.execute(waiting).scalar_one())

    fall_silent(postgres_url)
    with database.writing() as connection:
        other = threading.Thread(target=take_over)
        other.start()
        processes.eventually("a take-over that waits", waits)
        epochs.renew(connection)
    other.join(processes.LIMIT_SECONDS)

    assert [type(found) for found in outcome] == [StateHeld]
    with database.writing():
        pass
    database.close()


def test_ledger_is_closed_though_its_server_answers_no_more(postgres_url: str) -> None:
    """A stop must not wait for it; the call that does is told, and may be sent again later."""
    ledger = engines.open_ledger(postgres_url, lease_seconds=60.0)
    with look(postgres_url) as connection:
        others = text(
            "SELECT pid FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        [session] = connection.execute(others).scalars()
    told: list[AtollError] = []

    def ask() -> None:
        try:
            alone(ledger).members.register("late", "key", wall=3.0)
        except AtollError as error:
            told.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    closing = threading.Thread(target=ledger.close, daemon=True)
    os.kill(session, signal.SIGSTOP)
    try:
        asking.start()
        processes.eventually("a call under way", lambda: ledger._database._lock.locked())
        closing.start()
        for thread in (closing, asking):
            thread.join(processes.LIMIT_SECONDS)
        assert not (closing.is_alive() or asking.is_alive())
    finally:
        os.kill(session, signal.SIGCONT)

    assert [type(error) for error in told] == [StoreAway]


def test_island_is_told_to_wait_for_a_ledger_that_is_away(
    postgres_url: str, tmp_path: Path
) -> None:
    """The outcome of its upload is unknown; a final refusal would end the island."""
    told: list[AtollError] = []

    def upload_over_a_lost_connection() -> None:
        with served.serving(tmp_path, ledger=postgres_url) as coordinator:
            worker = coordinator.worker("a")
            frame = worker.frame()
            with look(postgres_url) as connection:
                end = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
                mine = "WHERE datname = current_database() AND pid <> pg_backend_pid()"
                connection.exec_driver_sql(end + mine)
            try:
                worker.link.upload(worker.identity(), frame, before_commit=lambda: None)
            except AtollError as error:
                told.append(error)
            coordinator.ended.wait(processes.LIMIT_SECONDS)

    with pytest.raises(StoreAway, match=r"connection .* was lost"):
        upload_over_a_lost_connection()

    assert [(type(error), error.retry) for error in told] == [(StoreAway, True)]


def test_stale_holder_neither_removes_nor_stores_a_blob(stale: Ledger) -> None:
    inner = MemoryBlobs()
    blobs = FencedBlobs(inner, stale.check_held)
    kept = inner.writer()
    kept.write(b"needed by the new holder")
    ref = kept.commit()
    writer = blobs.writer()
    writer.write(b"of the stale one")

    with pytest.raises(Superseded):
        blobs.delete(ref.sha256)
    with pytest.raises(Superseded):
        writer.commit()

    assert [stored.sha256 for stored in inner.stored()] == [ref.sha256]


def test_holder_removes_and_stores_blobs(postgres_url: str) -> None:
    ledger = engines.open_ledger(postgres_url)
    blobs = FencedBlobs(MemoryBlobs(), ledger.check_held)
    writer = blobs.writer()
    writer.write(b"garbage")

    ref = writer.commit()
    stored = list(blobs.stored())
    blobs.delete(ref.sha256)

    assert stored == [ref]
    assert list(blobs.stored()) == []
    ledger.close()
