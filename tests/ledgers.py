"""Records for ledgers, and moves that take one through a run's life."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, cast

from sqlalchemy import make_url

from atoll.ledger.connection import Connection, Mode
from atoll.ledger.ledger import Ledger
from atoll.ledger.postgres import connect
from atoll.ledger.records import (
    AnnouncementRecord,
    CheckpointRecord,
    ContributionRecord,
    DatasetRecord,
    EvaluationRecord,
    GroupRecord,
    LeaseRecord,
    ManifestRecord,
    PartRecord,
    Published,
    PublisherRecord,
    QueueRecord,
    RankRecord,
    RoundPlan,
    RoundState,
    RunRecord,
    SaveRecord,
    SnapshotRecord,
)
from atoll.ledger.sqlite.database import SqliteDatabase
from atoll.ledger.tables.transaction import Transaction

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


class _Alone:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def __getattr__(self, table: str) -> Any:
        return _Calls(self._ledger, table)


class _Calls:
    def __init__(self, ledger: Ledger, table: str) -> None:
        self._ledger = ledger
        self._table = table

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            with self._ledger.writing() as t:
                return getattr(getattr(t, self._table), method)(*args, **more)

        return call


def alone(ledger: Ledger) -> Transaction:
    """The tables of a ledger, where each call is a transaction of its own."""
    return cast(Transaction, _Alone(ledger))


def bare(ledger: Ledger) -> AbstractContextManager[Connection]:
    """The connection of a SQLite ledger outside any transaction: what changes is not sealed."""
    database = ledger._database
    assert isinstance(database, SqliteDatabase)
    return database.bare()


def state_hash(url: str) -> str:
    """Of a PostgreSQL ledger, read without holding it."""
    connection = connect.connected(make_url(url), url)
    connection.begin(Mode.READING, None)
    try:
        return Transaction(connection).state_hash()
    finally:
        connection.close()


class _Heard:
    """Fulfils `connection.Watcher`."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    def before(self, text: str) -> None:
        self.sent.append(text)

    def after(self, text: str) -> None:
        pass

    def commit(self) -> None:
        pass


@contextmanager
def listening() -> Iterator[list[str]]:
    """Every statement that ledgers are sent meanwhile."""
    heard = Connection.watcher = _Heard()
    try:
        yield heard.sent
    finally:
        Connection.watcher = None


def begin(ledger: Ledger, plan: RoundPlan) -> None:
    """Begins one round."""
    alone(ledger).rounds.begin([plan])


def freeze(
    ledger: Ledger, number: int, plan: RoundPlan | None, *, reissue: bool = True
) -> list[ContributionRecord]:
    """Freezes a round as a sync run does: what nobody contributed ends with it."""
    with ledger.writing() as t:
        ended = {(lease.round, lease.worker_id) for lease in t.leases.of_round(number)}
        return t.rounds.freeze(number, plan, ended=ended, reissue=reissue)


def publish(ledger: Ledger, number: int, published: Published) -> None:
    """Publishes a round as a sync run does: the next one opens, if it is planned."""
    with ledger.writing() as t:
        planned = [r.round for r in t.rounds.unpublished() if r.state is RoundState.PLANNED]
        t.rounds.publish(number, published, opens=planned)


# In the order of code points, which no locale gives.
NAMES = ["-dash", "0", "B", "Z.9", "_x", "a", "b"]


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
        applied=1,
        first=1,
        fragment=0,
        base="7" * 64,
        incarnation=1,
        sha256=f"blob of {worker_id}",
        nbytes=2**40,
        weight=1,
        rows=8,
        tokens=2**33,
        loss_sum=0.1 + 0.2,
        norm=1e-310,
        residual=0.1 + 0.7,
        carried=2**40,
        receipt=f"receipt of {worker_id}",
        accepted_wall=1_700_000_001.0,
    )
    if "round" in changes:
        changes = {"applied": changes["round"], "first": changes["round"], **changes}
    return replace(record, **changes)  # type: ignore[arg-type]


# Changes only with `play` or with the tables; every engine must give this same value.
STATE_OF_PLAY = "458291b92354d866513a3a188adcac016d59d2386c9a197713d36aa29e02b20d"


def play(ledger: Ledger) -> None:
    """A history that leaves rows in every table and leases in every state."""
    alone(ledger).run.create(RUN, MANIFEST)
    alone(ledger).credentials.set({"worker": "w" * 64, "admin": "a" * 64})
    for name in NAMES:
        alone(ledger).members.register(name, f"key {name}", wall=-0.0)
    alone(ledger).members.register("B", "new key", wall=7.125)
    alone(ledger).members.deregister("b", 1, wall=0.0)
    begin(ledger, plan(1, [lease(1, name, 8 * n, 8 * n + 8) for n, name in enumerate(NAMES)]))
    alone(ledger).contributions.accept(contribution("a"))
    alone(ledger).contributions.accept(contribution("B", incarnation=2))
    freeze(ledger, 1, plan(2, [lease(2, "a", 0, 8)], taken=(lease(1, "-dash", 0, 8),)))
    publish(ledger, 1, PUBLISHED)
    alone(ledger).rounds.extend(extension(2, [lease(2, "B", 100, 108)], cursor=108, taken=[]))
    alone(ledger).contributions.accept(contribution("a", round=2))
    freeze(ledger, 2, None)
    publish(ledger, 2, replace(PUBLISHED, published_leaves=b"\x00\xff"))
    alone(ledger).snapshots.add(SnapshotRecord(0, "m", "p", ()))
    alone(ledger).snapshots.add(SnapshotRecord(2, "m2", "p2", (("momentum", "s1"), ("a", "s2"))))
    alone(ledger).evaluations.add(EvaluationRecord(1, "a", 2.0 / 3.0, 10))
    alone(ledger).control.set({"action": "pause", "number": "1"})
    alone(ledger).datasets.add([DatasetRecord("d" * 16, "words", 2**40, 3)])
    queue = QueueRecord("d" * 16, 2**62, 0, 2**40, units=1000)
    units = replace(lease(3, "a", 2**39, 2**40), dataset_id="d" * 16, shuffle_seed=2**62, unit=500)
    begin(ledger, replace(plan(3, [units]), queues=(queue,)))
    alone(ledger).contributions.accept(contribution("a", round=3))
    ranks = (RankRecord(0, "B", 2, "10.0.0.1:4000", "pem"), RankRecord(1, "a", 1, "[::1]:1", ""))
    alone(ledger).groups.form(GroupRecord(9, 0.5, ranks, step=2**40))
    alone(ledger).groups.decide(9, round_number=3, goes_on=False)
    alone(ledger).publishers.add(PublisherRecord("a", "7" * 64, "main"))
    alone(ledger).announcements.add(AnnouncementRecord(3, "a", "stated", 1_700_000_000.25))
    alone(ledger).skips.add(3, "B", reason="SLOW", sentence="by 1 s", wall=-0.0)
    alone(ledger).saves.add(SaveRecord(9, 2**41, 1, "own", "before"))
    alone(ledger).checkpoints.add(
        CheckpointRecord(
            *(2, 2**41, 9, ("B", "a"), ("p0", "p1"), ("b0", "b1"), 8, 2**33, 0.1),
            late=((2**41, 0, 2), (2**41, 1, 2)),
        )
    )
    alone(ledger).checkpoints.report(
        PartRecord(
            *(3, 9, 1, "a", "part", "blob", 2**40, 0.1 + 0.2, 2**33, -0.0, 4), late=((7, 1, 2),)
        )
    )


# Moves of a ledger whose round 1 is open


def open_round(ledger: Ledger) -> None:
    """Leaves it as it is."""


def freeze_last(ledger: Ledger) -> None:
    freeze(ledger, 1, None)


def publish_last(ledger: Ledger) -> None:
    freeze_last(ledger)
    publish(ledger, 1, PUBLISHED)


def plan_second(ledger: Ledger) -> None:
    freeze(ledger, 1, plan(2, [lease(2, "a", 16, 24)]))
