"""The ledger seam: what the coordinator needs of durable, ordered records.

Every method is one transaction: it happens whole or not at all, and when a writing method returns
its effect survives a crash. Refusals are typed errors and change nothing. Safe to call from several
threads; calls are serialised.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from atoll.errors import AtollError
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


class Ledger(Protocol):
    """One run's records."""

    # The run and its manifests
    def create_run(self, run: RunRecord, manifest: ManifestRecord) -> None:
        """Records the run; StoreError when the ledger already holds one."""
        ...

    def run(self) -> RunRecord | None: ...

    def manifests(self) -> list[ManifestRecord]:
        """All versions, oldest first."""
        ...

    def add_manifest(self, manifest: ManifestRecord) -> None:
        """Records the next version, in force from the first round that is not planned yet.

        StoreError unless its number follows the newest one's and its first round the latest one.
        """
        ...

    # Credentials: role -> sha256 hex of the token
    def credentials(self) -> dict[str, str]: ...

    def set_credentials(self, hashes: dict[str, str]) -> None:
        """Replaces the stored hash of each given role."""
        ...

    # Workers
    def register(
        self, worker_id: str, key_sha256: str, *, wall: float, ip_address: str = "", port: int = 0
    ) -> WorkerRecord:
        """A new incarnation of `worker_id` (1 for a new one), active, with this key.

        In the same transaction a new generation, in which it is reached at this address, and its
        leases of rounds that are not frozen go over to this life, with the next lease epoch.
        """
        ...

    def deregister(self, worker_id: str, incarnation: int, *, wall: float) -> None:
        """Marks the worker inactive, with a new generation without it.

        UnknownWorker; Fenced when a later incarnation exists.
        """
        ...

    def generation(self) -> GenerationRecord:
        """The newest generation: the active workers by rank. Numbers only grow."""
        ...

    def workers(self) -> list[WorkerRecord]:
        """In worker_id order."""
        ...

    # What the operator wants: name -> value
    def control(self) -> dict[str, str]: ...

    def set_control(self, values: Mapping[str, str | None]) -> None:
        """Sets each name to its value, all at once; None takes the name away."""
        ...

    # Datasets and the queues of their units
    def add_datasets(self, datasets: Sequence[DatasetRecord]) -> None:
        """Knows these datasets from now on; DatasetMismatch when one is known by another length."""
        ...

    def datasets(self) -> list[DatasetRecord]:
        """In dataset_id order."""
        ...

    def queues(self) -> Queues:
        """Every queue entry: the sound ones, and by name and reason those that are damaged."""
        ...

    def cursors(self) -> dict[str, int]:
        """By dataset_id, where rows were leased: the first position that never was."""
        ...

    def row_counts(self) -> list[RowCount]:
        """Leased rows by (dataset_id, epoch, worker_id, state), in this order."""
        ...

    # Rounds
    def begin(self, plan: RoundPlan) -> None:
        """Inserts a round that no freeze has planned, open, with its leases.

        The first one, or the one after a published round that was to be the last; StoreError when
        the latest round is not published.
        """
        ...

    def extend(self, plan: RoundPlan) -> None:
        """Adds the plan's leases to its round, the latest, planned or open; moves its cursor."""
        ...

    def rounds(self, *, first: int = 1, last: int | None = None) -> list[RoundRecord]: ...

    def latest_round(self) -> RoundRecord | None: ...

    def leases(self, round_number: int) -> list[LeaseRecord]:
        """In (worker_id, dataset_id, start) order."""
        ...

    def reopened(self) -> list[LeaseRecord]:
        """Leases in state `reopened`, oldest round first, then by dataset_id and start."""
        ...

    def accept(self, contribution: ContributionRecord) -> ContributionRecord:
        """Inserts the contribution and marks its leases done, with the units that are whole now.

        Re-checks inside the transaction, in this order: the worker exists (UnknownWorker), the
        incarnation is its latest (Fenced), the round exists (WrongRound). The same sha256 under the
        same key returns the first record, whatever the round's state; another sha256 is Conflict. A
        round that is frozen or published without it is StaleContribution; one that is only planned
        is WrongRound; a worker without a lease in the round, in this life, is LeaseLost.
        """
        ...

    def contributions(self, round_number: int) -> list[ContributionRecord]:
        """In worker_id order: the canonical order of the fold."""
        ...

    def every_contribution(self) -> AbstractContextManager[Iterator[ContributionRecord]]:
        """Those of all rounds in (round, worker_id) order, by one statement, read as they are used.

        The ledger answers nothing else until the block ends.
        """
        ...

    def counted_tokens(self) -> int:
        """Tokens in the contributions of every frozen and published round."""
        ...

    def accepted_blobs(self, *, first: int = 1) -> set[str]:
        """Names of the blobs that contributions to round `first` and later ones refer to."""
        ...

    def expire(self, round_number: int, workers: Collection[str], *, reissue: bool = True) -> int:
        """Ends what these workers still have leased in the open round; how many leases there were.

        They become `reopened`, or without `reissue` `given_up`. WrongRound unless open.
        """
        ...

    def freeze(
        self, round_number: int, next_plan: RoundPlan | None, *, reissue: bool = True
    ) -> list[ContributionRecord]:
        """Fixes the ordered set of an open round and plans the next, in one transaction.

        Leases of the round without a contribution become `reopened`, or without `reissue`
        `given_up`; `next_plan.taken` becomes
        `taken` (what is `left` of one stays reopened); the next round is inserted as `planned` with
        its leases. WrongRound unless open.
        """
        ...

    def publish(self, round_number: int, published: Published) -> None:
        """Records a frozen round's digests and opens the planned next round, if there is one."""
        ...

    # Snapshots and evaluations
    def add_snapshot(self, snapshot: SnapshotRecord) -> None: ...

    def snapshots(self) -> list[SnapshotRecord]:
        """Oldest first."""
        ...

    def drop_snapshots(self, *, below_version: int) -> None: ...

    def add_evaluation(self, evaluation: EvaluationRecord) -> None:
        """The first report of a (version, worker_id) stands; a repeated one changes nothing."""
        ...

    def evaluations(self, *, first: int = 0) -> list[EvaluationRecord]:
        """Of version `first` and later ones, in (version, worker_id) order."""
        ...

    # The right to write
    def identity(self) -> str | None:
        """What names this database among copies of it; None: the place of its file does."""
        ...

    def check_held(self) -> None:
        """Superseded when another process has taken this ledger over."""
        ...

    def on_lost(self, tell: Callable[[AtollError], None]) -> None:
        """Calls `tell` once, from any thread, when this process may no longer write."""
        ...

    # Whole
    def damage(self) -> list[LedgerDamage]:
        """What is no longer as it was written; reads every row. Nothing on PostgreSQL."""
        ...

    def state_hash(self) -> str:
        """sha256 over every row of every table: equal exactly when the durable state is."""
        ...

    def copy_to(self, path: str) -> None:
        """Writes a consistent copy of the whole ledger as a new SQLite file at `path`."""
        ...

    def close(self) -> None: ...
