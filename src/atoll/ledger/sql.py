"""The ledger in a SQL database: one method, one transaction.

Only pairs each method of `base.Ledger` with its transaction; the statements are in the modules it
calls.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager

from atoll.errors import AtollError
from atoll.ledger import (
    contributions,
    generations,
    members,
    queues,
    rounds,
    seals,
    versions,
    whole,
)
from atoll.ledger.database import Database
from atoll.ledger.records import (
    ContributionRecord,
    DatasetRecord,
    EvaluationRecord,
    GenerationRecord,
    LeaseRecord,
    LedgerDamage,
    ManifestRecord,
    Published,
    Queues,
    RoundPlan,
    RoundRecord,
    RowCount,
    RunRecord,
    SnapshotRecord,
    WorkerRecord,
)


class SqlLedger:
    """Fulfils `base.Ledger` over a migrated database; refusals and orders are documented there."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create_run(self, run: RunRecord, manifest: ManifestRecord) -> None:
        with self._database.writing() as connection:
            members.create_run(connection, run, manifest)

    def run(self) -> RunRecord | None:
        with self._database.reading() as connection:
            return members.find_run(connection)

    def manifests(self) -> list[ManifestRecord]:
        with self._database.reading() as connection:
            return members.manifests(connection)

    def add_manifest(self, manifest: ManifestRecord) -> None:
        with self._database.writing() as connection:
            latest = rounds.latest_round(connection)
            members.add_manifest(connection, manifest, after_round=latest.round if latest else 0)

    def credentials(self) -> dict[str, str]:
        with self._database.reading() as connection:
            return members.credentials(connection)

    def set_credentials(self, hashes: dict[str, str]) -> None:
        with self._database.writing() as connection:
            members.set_credentials(connection, hashes)

    def register(
        self, worker_id: str, key_sha256: str, *, wall: float, ip_address: str = "", port: int = 0
    ) -> WorkerRecord:
        with self._database.writing() as connection:
            record = members.register(connection, worker_id, key_sha256=key_sha256, wall=wall)
            rounds.hand_over(connection, worker_id, record.incarnation)
            generations.renew(connection, wall=wall, placed={worker_id: (ip_address, port)})
            return record

    def deregister(self, worker_id: str, incarnation: int, *, wall: float) -> None:
        with self._database.writing() as connection:
            members.deregister(connection, worker_id, incarnation)
            generations.renew(connection, wall=wall, placed={})

    def generation(self) -> GenerationRecord:
        with self._database.reading() as connection:
            return generations.newest(connection)

    def workers(self) -> list[WorkerRecord]:
        with self._database.reading() as connection:
            return members.workers(connection)

    def control(self) -> dict[str, str]:
        with self._database.reading() as connection:
            return members.control(connection)

    def set_control(self, values: Mapping[str, str | None]) -> None:
        with self._database.writing() as connection:
            members.set_control(connection, values)

    def add_datasets(self, datasets: Sequence[DatasetRecord]) -> None:
        with self._database.writing() as connection:
            queues.add_datasets(connection, datasets)

    def datasets(self) -> list[DatasetRecord]:
        with self._database.reading() as connection:
            return queues.datasets(connection)

    def queues(self) -> Queues:
        with self._database.reading() as connection:
            return queues.read(connection)

    def cursors(self) -> dict[str, int]:
        with self._database.reading() as connection:
            return queues.cursors(connection)

    def row_counts(self) -> list[RowCount]:
        with self._database.reading() as connection:
            return queues.row_counts(connection)

    def begin(self, plan: RoundPlan) -> None:
        with self._database.writing() as connection:
            rounds.begin(connection, plan)

    def extend(self, plan: RoundPlan) -> None:
        with self._database.writing() as connection:
            rounds.extend(connection, plan)

    def rounds(self, *, first: int = 1, last: int | None = None) -> list[RoundRecord]:
        with self._database.reading() as connection:
            return rounds.rounds(connection, first=first, last=last)

    def latest_round(self) -> RoundRecord | None:
        with self._database.reading() as connection:
            return rounds.latest_round(connection)

    def leases(self, round_number: int) -> list[LeaseRecord]:
        with self._database.reading() as connection:
            return rounds.leases(connection, round_number)

    def reopened(self) -> list[LeaseRecord]:
        with self._database.reading() as connection:
            return rounds.reopened(connection)

    def accept(self, contribution: ContributionRecord) -> ContributionRecord:
        with self._database.writing() as connection:
            return contributions.accept(connection, contribution)

    def contributions(self, round_number: int) -> list[ContributionRecord]:
        with self._database.reading() as connection:
            return contributions.of_round(connection, round_number)

    @contextmanager
    def every_contribution(self) -> Iterator[Iterator[ContributionRecord]]:
        with (
            self._database.reading() as connection,
            closing(contributions.every(connection)) as found,
        ):
            yield found

    def counted_tokens(self) -> int:
        with self._database.reading() as connection:
            return contributions.counted_tokens(connection)

    def accepted_blobs(self, *, first: int = 1) -> set[str]:
        with self._database.reading() as connection:
            return contributions.accepted_blobs(connection, first=first)

    def expire(self, round_number: int, workers: Collection[str], *, reissue: bool = True) -> int:
        with self._database.writing() as connection:
            return rounds.expire(connection, round_number, workers, reissue=reissue)

    def freeze(
        self, round_number: int, next_plan: RoundPlan | None, *, reissue: bool = True
    ) -> list[ContributionRecord]:
        with self._database.writing() as connection:
            return rounds.freeze(connection, round_number, next_plan, reissue=reissue)

    def publish(self, round_number: int, published: Published) -> None:
        with self._database.writing() as connection:
            rounds.publish(connection, round_number, published)

    def add_snapshot(self, snapshot: SnapshotRecord) -> None:
        with self._database.writing() as connection:
            versions.add_snapshot(connection, snapshot)

    def snapshots(self) -> list[SnapshotRecord]:
        with self._database.reading() as connection:
            return versions.snapshots(connection)

    def drop_snapshots(self, *, below_version: int) -> None:
        with self._database.writing() as connection:
            versions.drop_snapshots(connection, below_version=below_version)

    def add_evaluation(self, evaluation: EvaluationRecord) -> None:
        with self._database.writing() as connection:
            versions.add_evaluation(connection, evaluation)

    def evaluations(self, *, first: int = 0) -> list[EvaluationRecord]:
        with self._database.reading() as connection:
            return versions.evaluations(connection, first=first)

    def identity(self) -> str | None:
        return self._database.identity

    def check_held(self) -> None:
        # Nobody can take a SQLite file over: its lock ends with the process.
        if not self._database.is_sqlite:
            with self._database.writing():
                pass

    def on_lost(self, tell: Callable[[AtollError], None]) -> None:
        self._database.on_lost(tell)

    def damage(self) -> list[LedgerDamage]:
        return seals.check(self._database)

    def state_hash(self) -> str:
        with self._database.reading() as connection:
            return whole.state_hash(connection)

    def copy_to(self, path: str) -> None:
        whole.copy(self._database, path)

    def close(self) -> None:
        self._database.close()
