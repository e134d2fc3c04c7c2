"""The rows of the ledger as frozen values. No SQL, no tensors, no policy."""

from dataclasses import dataclass
from enum import StrEnum


class RoundState(StrEnum):
    """Where a round is in its life; it only ever moves down this list."""

    PLANNED = "planned"  # its rows are leased, the round before it is not published yet
    OPEN = "open"  # contributions are accepted
    FROZEN = "frozen"  # the ordered set is fixed, the outer step may be computed
    PUBLISHED = "published"  # digests are recorded, the version is the run's


class LeaseState(StrEnum):
    """What became of rows that were given to a worker."""

    LEASED = "leased"
    DONE = "done"  # in an accepted contribution
    REOPENED = "reopened"  # the round closed without them; a later plan takes them again
    TAKEN = "taken"  # was reopened, and a later lease now covers the same rows


@dataclass(frozen=True, slots=True)
class RunRecord:
    run_id: str
    created_wall: float
    initial_sha256: str  # blob of the initial weights


@dataclass(frozen=True, slots=True)
class ManifestRecord:
    version: int
    sha256: str
    body: str  # canonical JSON
    from_round: int  # the first round under this manifest


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    worker_id: str
    key_sha256: str  # hash of the island key; the key itself is never stored
    incarnation: int
    active: bool  # registered and not deregistered; liveness is not durable
    registered_wall: float


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """A worker's place in a generation."""

    rank: int
    worker_id: str
    incarnation: int
    ip_address: str  # where the worker says it is reached; "" when it was never told
    port: int  # 0: it only dials out


@dataclass(frozen=True, slots=True)
class GenerationRecord:
    """A frozen membership; number 0, without members, is that of a run nobody has joined."""

    number: int
    created_wall: float
    members: tuple[MemberRecord, ...]  # by rank, which is worker_id order


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """Rows `[start, stop)` of the run's row sequence, given to one worker for one round."""

    round: int
    worker_id: str
    start: int
    stop: int
    state: LeaseState = LeaseState.LEASED


@dataclass(frozen=True, slots=True)
class ContributionRecord:
    """One accepted contribution; `(round, worker_id)` is its key."""

    round: int
    worker_id: str
    incarnation: int
    sha256: str  # blob of the frame
    nbytes: int
    weight: int  # what the fold multiplies by
    rows: int
    tokens: int
    loss_sum: float  # over `tokens`
    norm: float
    receipt: str
    accepted_wall: float


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """A round; digest fields are None until it is published."""

    round: int
    state: RoundState
    manifest_sha256: str
    cursor: int  # first row position that no plan up to and including this round has used
    prev_hash: str | None = None
    hash: str | None = None
    master_digest: str | None = None
    published_digest: str | None = None
    leaves: bytes | None = None  # hash of each leaf of the master, concatenated
    published_leaves: bytes | None = None  # the same for θ̂; None when it equals the master
    published_wall: float | None = None


@dataclass(frozen=True, slots=True)
class Published:
    """What publishing a round records."""

    prev_hash: str
    hash: str
    master_digest: str
    published_digest: str
    leaves: bytes
    published_leaves: bytes | None
    published_wall: float


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """The rows of one round, as decided when the round before it froze."""

    round: int
    manifest_sha256: str
    cursor: int
    leases: tuple[LeaseRecord, ...]
    taken: tuple[LeaseRecord, ...] = ()  # reopened leases whose rows this plan gives out again
    left: tuple[LeaseRecord, ...] = ()  # parts of `taken` that were not needed; they stay reopened


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """Blobs from which version `version` is restored without replaying what came before."""

    version: int
    master_sha256: str
    published_sha256: str
    slots_sha256: tuple[tuple[str, str], ...]  # (slot name, blob) of the outer optimizer's state


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """A partial sum of held-out loss of one version, by one worker."""

    version: int
    worker_id: str
    loss_sum: float
    tokens: int


@dataclass(frozen=True, slots=True)
class LedgerDamage:
    """A part of the ledger that is no longer as it was written."""

    place: str  # the table; "" when it is the file as a whole
    key: str  # which rows of it: a round, a version, or a primary key as SQL; "" for all
    reason: str
    is_sealed: bool = True  # False: there is no seal to compare these rows with
    ledger: str = "the ledger"  # the file

    def __str__(self) -> str:
        table = f", table {self.place!r}" if self.place else ""
        return f"{self.ledger}{table}{f' at {self.key}' if self.key else ''}: {self.reason}"
