"""The rows of the ledger as frozen values. No SQL, no tensors, no policy."""

from dataclasses import dataclass
from enum import StrEnum

from atoll.ledger.units import Cut
from atoll.rows import Late, RowRange


def queue_name(dataset_id: str, shuffle_seed: int, epoch: int) -> str:
    """The key of a queue."""
    return f"{dataset_id}/{shuffle_seed}/{epoch}"


class RoundState(StrEnum):
    """Where a round is in its life; it only ever moves down this list."""

    PLANNED = "planned"  # its rows are leased; publishing an earlier round opens it
    OPEN = "open"  # contributions are accepted
    FROZEN = "frozen"  # the ordered set is fixed, the outer step may be computed
    PUBLISHED = "published"  # digests are recorded, the version is the run's


class LeaseState(StrEnum):
    """What became of rows that were given to a worker."""

    LEASED = "leased"
    DONE = "done"  # in an accepted contribution
    REOPENED = "reopened"  # the lease ended without them; a later plan takes them again
    TAKEN = "taken"  # was reopened, and a later lease now covers the same rows
    GIVEN_UP = "given_up"  # the lease ended without them, and the run's policy never re-issues


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
class PublisherRecord:
    """Who signs what a worker publishes, and where it does; the same for as long as the run is."""

    worker_id: str
    public_key: str
    bucket: str  # a name of the manifest's


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """A worker's place in a generation."""

    rank: int
    worker_id: str
    incarnation: int
    ip_address: str  # where the worker says it is reached; "" when it was never told
    port: int  # 0: it only dials out
    certificate: str = ""  # PEM that the others trust; "" without TLS or where nobody dials it


@dataclass(frozen=True, slots=True)
class GenerationRecord:
    """A frozen membership; a run that nobody has joined is at number 0, without members."""

    number: int
    created_wall: float
    members: tuple[MemberRecord, ...]  # by rank, which is worker_id order


@dataclass(frozen=True, slots=True)
class DatasetRecord:
    """A dataset that rows are issued of."""

    dataset_id: str  # hash of what defines it, its length left out
    name: str
    length: int  # rows of an epoch; 0: a stream
    weight: int  # its share of the rows beside the other datasets of the run


@dataclass(frozen=True, slots=True)
class QueueRecord:
    """The units of one epoch of one dataset in one order, and what became of them."""

    dataset_id: str
    shuffle_seed: int
    epoch: int
    length: int  # as in its dataset
    units: int  # as it was cut when it was made; of a stream those issued so far
    unit_rows: int = 0  # rows of a unit of a stream; 0 otherwise
    issued: bytes = b""  # units of which some row was ever leased
    done: bytes = b""  # units of which every row is in an accepted contribution

    @property
    def name(self) -> str:
        """Its key in the ledger."""
        return queue_name(self.dataset_id, self.shuffle_seed, self.epoch)

    @property
    def cut(self) -> Cut:
        """Where its units are."""
        return Cut(self.epoch * self.length, self.length, self.units, self.unit_rows)


@dataclass(frozen=True, slots=True)
class DamagedQueue:
    """A queue entry that cannot be what was written; it is left as it is and not used."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Queues:
    """Every queue entry of a ledger."""

    sound: tuple[QueueRecord, ...] = ()  # by dataset_id, then epoch
    damaged: tuple[DamagedQueue, ...] = ()  # by name


@dataclass(frozen=True, slots=True)
class RowCount:
    """How many rows of one queue are leased to one worker, in leases of one state."""

    dataset_id: str
    epoch: int
    worker_id: str
    state: LeaseState
    rows: int


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """Positions `[start, stop)` of a dataset's row sequence, given to one worker for one round.

    They lie in one queue; `unit` is where they begin.
    """

    round: int
    worker_id: str
    start: int
    stop: int
    state: LeaseState = LeaseState.LEASED
    dataset_id: str = ""
    shuffle_seed: int = 0
    epoch: int = 0  # of the data
    unit: int = 0
    lease_epoch: int = 1  # grows whenever the same rows are issued again
    incarnation: int = 1  # the life of the worker that holds it; the ledger writes it

    @property
    def row_range(self) -> RowRange:
        """The rows it gives."""
        return RowRange(self.dataset_id, self.start, self.stop)

    @property
    def queue(self) -> str:
        """The key of its queue."""
        return queue_name(self.dataset_id, self.shuffle_seed, self.epoch)


@dataclass(frozen=True, slots=True)
class ContributionRecord:
    """One accepted contribution; `(round, worker_id)` is its key."""

    round: int  # that it was made for
    worker_id: str
    applied: int  # the round that folds it
    first: int  # the first round whose rows it contains
    fragment: int  # of the model; 0 where there is one, -1: all of them
    base: str  # digest of the published weights, of its fragment, that it started from
    incarnation: int
    sha256: str  # blob of the frame
    nbytes: int
    weight: int  # what the fold multiplies by
    rows: int
    tokens: int
    loss_sum: float  # over `tokens`
    norm: float
    residual: float  # L2 norm of what its island holds back after it; 0: nothing
    carried: int  # the round of the contribution whose residual is in it; 0: none is
    receipt: str
    accepted_wall: float


@dataclass(frozen=True, slots=True)
class AnnouncementRecord:
    """What a worker stated of a contribution that was pulled; recorded together with it."""

    round: int
    worker_id: str
    statement: str  # the signed document
    stamp: float | None = None  # its server's time of the object


@dataclass(frozen=True, slots=True)
class SkipRecord:
    """A contribution that a round did without, by its worker's fault."""

    round: int
    worker_id: str
    number: int  # from 1, of this worker in this round
    reason: str  # one word
    sentence: str
    wall: float


@dataclass(frozen=True, slots=True)
class RoundTotals:
    """What a round folds, in sum."""

    contributions: int
    tokens: int
    loss_sum: float  # over `tokens`
    staleness: int = 0  # the highest: how many rounds after the one it was made for


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """A round; digest fields are None until it is published."""

    round: int
    state: RoundState
    manifest_sha256: str
    cursor: int  # rows issued for the first time by plans up to and including this round's
    fragment: int = 0  # of the model that it moves; 0 where there is one, -1: all of them
    tokens: int = 0  # of the run before it, which its learning rate starts from
    prev_hash: str | None = None
    hash: str | None = None
    master_digest: str | None = None
    published_digest: str | None = None
    leaves: bytes | None = None  # hash of each leaf of the master, concatenated
    published_leaves: bytes | None = None  # the same for θ̂; None when it equals the master
    published_wall: float | None = None
    artifact_sha256: str | None = None  # of the frame that its contributions make; None: none is


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
    artifact_sha256: str | None = None


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """The rows of one round, as decided when it was begun or an earlier round froze."""

    round: int
    manifest_sha256: str
    cursor: int
    leases: tuple[LeaseRecord, ...]
    taken: tuple[LeaseRecord, ...] = ()  # reopened leases whose rows this plan gives out again
    left: tuple[LeaseRecord, ...] = ()  # parts of `taken` that were not needed; they stay reopened
    queues: tuple[QueueRecord, ...] = ()  # those that the leases lie in; new ones are made
    fragment: int = 0  # as in RoundRecord, and so are `tokens`
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """Blobs from which version `version` is restored without replaying what came before."""

    version: int
    master_sha256: str
    published_sha256: str
    slots_sha256: tuple[tuple[str, str], ...]  # (slot name, blob) of the outer optimizer's state


@dataclass(frozen=True, slots=True)
class RankRecord:
    """A worker's place in a rank group, and how the others reach it."""

    rank: int
    worker_id: str
    incarnation: int
    address: str  # host:port
    certificate: str


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """An ordered membership that trains together, step by step, until it is over."""

    number: int  # at least that of the generation it was formed in; numbers only grow
    created_wall: float
    members: tuple[RankRecord, ...]  # by rank, which is the order of the ring
    step: int  # the last one in what it set out from
    decided: int = 0  # the newest round at whose end it was told how to go on; 0: none
    goes_on: bool = True  # what it was told then
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class SaveRecord:
    """A rank's shard of a step, and that of the rank before it, are on its disk."""

    group_number: int
    step: int
    rank: int
    own: str  # hashes
    predecessor: str


@dataclass(frozen=True, slots=True)
class PartRecord:
    """A rank's part of a checkpoint that is a blob, and what the rank measured in its round."""

    round: int
    group_number: int
    rank: int
    worker_id: str
    part: str  # hash of the save
    blob: str
    nbytes: int
    loss_sum: float  # of the round, over `tokens`
    tokens: int
    evaluation_loss: float  # the rank's share of the held-out loss, as a sum
    evaluation_tokens: int
    late: tuple[Late, ...] = ()  # of the round; the same of all ranks


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """A save of all ranks of a group as blobs: what a round of a sharded run ends with."""

    round: int
    step: int
    group_number: int
    members: tuple[str, ...]  # by rank
    parts: tuple[str, ...]  # hashes of their saves
    blobs: tuple[str, ...]
    rows: int  # that are done by it
    tokens: int
    loss_sum: float  # over `tokens`
    late: tuple[Late, ...] = ()  # whose rows are in no sum and open again, by step and rank


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
