"""Requests and replies of the control plane, shared by both sides.

Sizes are bounded here, so a body can be refused by its schema before anything looks at it.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, model_validator

from atoll.errors import VersionMismatch
from atoll.protocol.control import Command
from atoll.protocol.exchange import Ask, Route, Waiting
from atoll.protocol.fields import (
    AtMost,
    Message,
    NotNegative,
    Number,
    OfQuery,
    RunName,
    Whole,
    WorkerName,
)
from atoll.protocol.manifest import Manifest, Sha256, Word
from atoll.rows import RowRange
from atoll.settings import Choice

BarrierName = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,64}$")]
Host = Annotated[str, Field(pattern=r"^[A-Za-z0-9.:_-]{1,255}$")]
Port = Annotated[int, Field(strict=True, ge=0, le=65535)]
MAX_WORKERS = 1_000  # in one answer
MAX_UNDER_WAY = 256  # rounds that one island trains or hands in
_SETTINGS_BYTES = 256 << 10  # those of a run, with 64 buckets of 2 kB and a certificate
Seconds = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
PublicKey = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  # Ed25519


class Done(Message):
    ok: Literal[True] = True


class HealthRequest(Ask[Done], route=Route("GET", "/health", sender="anyone", in_loop=True)):
    """Is the coordinator well? Anyone may ask, without a token."""


class Identity(Message):
    """Who speaks, in which life, under which manifest; on every mutating message."""

    run_id: RunName
    manifest_sha256: Sha256
    worker_id: WorkerName
    incarnation: Whole
    island_key: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    generation: Whole  # the membership the sender knows; an earlier one is refused


class RegisterReply(Message):
    incarnation: Whole
    generation: Whole
    version: Whole
    digest: Sha256


class Publisher(Message):
    """Who signs what an island publishes, and into which bucket of the run it publishes."""

    key: PublicKey
    bucket: Word


class RegisterRequest(
    Ask[RegisterReply], route=Route("POST", "/workers/register", body_bytes=_SETTINGS_BYTES)
):
    """A worker asks to take part; the island key proves a restarted one."""

    run_id: RunName
    manifest_sha256: Sha256
    worker_id: WorkerName
    island_key: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    hostname: Annotated[str, Field(max_length=255)] = ""
    ip_address: Host | None = None  # where others reach it; without one, where it speaks from
    port: Port = 0  # 0: it only dials out
    certificate: Annotated[str, Field(max_length=8192)] = ""  # PEM, where ranks dial each other
    layout_digest: Sha256
    data_identity: dict[str, Any]
    # The settings the worker has adopted: a hash that differs is told by the first field.
    settings: dict[str, Any] = Field(default_factory=dict)
    # By name, of every codec it speaks; one it does not state is version 1.
    codec_versions: dict[str, Whole] = Field(default_factory=dict)
    publishes: Publisher | None = None  # where islands publish into buckets; the same for good


class Telemetry(Message):
    """What an island tells about itself: shown, and its speed may decide how many rows it is given.

    Nothing else depends on it, and no weights do but through the rows that are leased.
    """

    round: Whole = 0
    step: Whole = 0
    tokens: Whole = 0  # trained since this process started
    tokens_per_second: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = 0.0
    loss: Number | None = None
    bytes_sent: Whole = 0
    bytes_received: Whole = 0
    # Of a rank of a sharded run, since its process started:
    gather_seconds: Seconds = 0.0  # waited for weights
    compute_seconds: Seconds = 0.0
    reduce_seconds: Seconds = 0.0  # waited for sums of gradients
    step_seconds: Seconds = 0.0  # updated its part of the model
    rank_bytes_sent: Whole = 0  # to other ranks, saves included
    rank_bytes_received: Whole = 0
    rolled_back_steps: Whole = 0  # made, and made again after a group went back to an earlier one
    late_steps: Whole = 0  # that were committed without this rank while it computed them

    @property
    def communication_share(self) -> float | None:
        """Of the seconds of a rank's steps, those that it waited for others; None without any."""
        waited = self.gather_seconds + self.reduce_seconds
        total = waited + self.compute_seconds + self.step_seconds
        return waited / total if total else None


class HeartbeatReply(Message):
    """`steps` only tells: how many the island would be given if it asked now."""

    generation: Whole
    command: Command = Command()
    steps: Whole = 0


class HeartbeatRequest(
    Ask[HeartbeatReply],
    route=Route("POST", "/workers/{worker_id}/heartbeat", leader_alone=True, in_loop=True),
):
    """A sign of life, and what the island tells about itself."""

    identity: Identity
    telemetry: Telemetry = Telemetry()
    acknowledged: Whole = 0  # number of the operator's newest command that this island knows


class EvaluationTask(Message):
    """Held-out rows `[start, stop)` to evaluate at `version`, or at a later one if that will do."""

    version: Whole
    start: Whole
    stop: Whole
    may_be_later: bool = False  # nobody else has a share of it, and the report says which it is

    def is_answered_by(self, version: int) -> bool:
        """Whether the loss of this version is what is asked for."""
        return version == self.version or (self.may_be_later and version > self.version)


class Assignment(Message):
    """What the island does next.

    `train`: rows of `round` from weights `version`. `wait`: nothing yet, ask again; while the round
    before it is being computed, with the rows of the next one, to be read meanwhile. `fetch`: the
    island's weights are not the published ones; download and ask again. `stop`: the run is over.
    """

    action: Literal["train", "wait", "fetch", "stop"]
    version: Whole
    digest: Sha256
    round: Whole | None = None
    manifest_sha256: Sha256 | None = None  # the manifest that the round is under
    fragment: Annotated[int, Field(strict=True, ge=-1)] = (
        0  # that the round carries; -1: the whole model
    )
    ranges: tuple[RowRange, ...] = ()
    steps: Whole = 0  # inner steps that the rows are for
    global_tokens: Whole = 0  # accepted in the run before this round
    num_planned: Whole = 0  # islands whose tokens the learning rate counts for each step
    evaluation: EvaluationTask | None = None
    generation: Whole = 0  # the present one
    reason: str = ""
    upcoming: Whole = 0  # the round that is planned and not open yet; 0: none
    upcoming_ranges: tuple[RowRange, ...] = ()


class AssignmentRequest(
    Waiting[Assignment],
    route=Route("POST", "/workers/{worker_id}/assignment", body_bytes=8 << 10),
):
    """What next? `version` and `digest` say which published weights the island holds."""

    identity: Identity
    version: Whole | None = None
    digest: Sha256 | None = None
    upcoming: Whole = 0  # the newest planned round whose rows the island knows
    awaits: Whole = 0  # the round that the island must merge before it goes on; 0: none
    # Rounds that it trains or hands in: not to be given again.
    under_way: Annotated[tuple[Whole, ...], AtMost(MAX_UNDER_WAY)] = ()

    def is_answered(self, reply: Assignment) -> bool:
        """Whether there is something to do, or rows to read meanwhile."""
        return reply.action != "wait" or reply.upcoming > self.upcoming


class EvaluationReport(Ask[Done], route=Route("POST", "/workers/{worker_id}/evaluation")):
    """A partial sum of held-out loss with its honest count."""

    identity: Identity
    version: Whole
    loss_sum: Number
    tokens: Annotated[int, Field(strict=True, ge=1, le=2**53)]


class LeaveRequest(Ask[Done], route=Route("DELETE", "/workers/{worker_id}")):
    """The sender takes part no more."""

    identity: Identity


class BarrierReply(Message):
    """`complete` once every member of the generation has come; else `missing` names the others."""

    generation: Whole
    name: BarrierName
    complete: bool
    arrived: Whole
    missing: tuple[WorkerName, ...]


class BarrierRequest(
    Waiting[BarrierReply], route=Route("POST", "/generations/{generation}/barriers/{name}")
):
    """The sender has come to a barrier; the answer waits for the others, up to `wait_seconds`."""

    identity: Identity
    name: BarrierName

    def is_answered(self, reply: BarrierReply) -> bool:
        """Whether all have come."""
        return reply.complete


class PageOfWorkers(Message):
    """An answer about workers, in worker_id order, of which a page is sent."""

    more_after: str = ""  # the name to ask the next page with; empty: this is the last


P = TypeVar("P", bound=PageOfWorkers)


class PageRequest(Ask[P]):
    """Asks for the workers after a name, `limit` of them at most."""

    after: Annotated[str, Field(max_length=64)] = ""
    limit: Annotated[int, Field(strict=True, ge=1, le=MAX_WORKERS), OfQuery] = MAX_WORKERS

    def page(self, whole: P) -> P:
        """What is asked for of an answer about all workers."""
        named: Any = whole
        rest = [worker for worker in named.workers if worker.worker_id > self.after]
        kept = tuple(rest[: self.limit])
        more_after = kept[-1].worker_id if len(rest) > len(kept) else ""
        return whole.model_copy(update={"workers": kept, "more_after": more_after})


class ReadyMember(Message):
    """A member of the present generation; ranks are 0 to n-1 in worker_id order."""

    worker_id: WorkerName
    ip_address: str
    port: Port
    rank: Whole


class Ready(PageOfWorkers):
    """Whether `min_workers` are in, and who: the members of one generation."""

    ready: bool
    active_workers: Whole
    min_workers: Whole
    generation: Whole
    workers: tuple[ReadyMember, ...]


class ReadyRequest(PageRequest[Ready], route=Route("GET", "/training/ready", large=True)):
    """Are at least `min_workers` in? Without a number: as many as the manifest asks for."""

    min_workers: Annotated[int, Field(strict=True, ge=1, le=2**31), OfQuery] | None = None


class WorkerEntry(Message):
    """A worker that ever registered.

    `live`: a member that is heard. `late`: a member that is overdue or whose presence is lost.
    `evicted`: taken for dead. `left`: it said goodbye.
    """

    worker_id: WorkerName
    incarnation: Whole
    state: Literal["live", "late", "evicted", "left"]
    presence: Literal["open", "lost", "none"]
    seconds_since_heard: float | None  # None: not in this life of the coordinator
    rank: Whole | None  # None: no member
    ip_address: str
    port: Port
    hostname: str
    ping_ms: float | None = None  # where ranks dial each other
    reason: str = ""  # why it was evicted


class Workers(PageOfWorkers):
    generation: Whole
    workers: tuple[WorkerEntry, ...]


class WorkersRequest(PageRequest[Workers], route=Route("GET", "/workers", large=True)):
    """Who ever registered, and how does each fare?"""


class Info(Manifest):
    """The whole manifest, its hash, and where the data plane is."""

    run_id: RunName
    manifest_sha256: Sha256
    model_hash: Sha256  # layout digest: names, shapes, dtypes
    version: Whole
    transfer_port: Port

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, value: Any) -> Any:
        # A default here would be a setting of the worker's own.
        if isinstance(value, dict) and (name := _left_out(cls, value)):
            raise VersionMismatch(
                f"the coordinator's /info leaves out {name!r}, which this release needs; nothing "
                f"is assumed in its place, so run the same release of atoll on both sides"
            )
        return value

    def settings(self) -> dict[str, Any]:
        """The settings alone, as JSON."""
        return self.model_dump(mode="json", include=set(Manifest.model_fields))

    def manifest(self) -> Manifest:
        """The settings alone."""
        kept = {name: getattr(self, name) for name in Manifest.model_fields}
        return Manifest.model_validate(kept)


class InfoRequest(Ask[Info], route=Route("GET", "/info")):
    """Which settings does the run have? Those in force, or of the version with a given hash."""

    manifest: Sha256 | None = None


def _left_out(model: type[BaseModel], value: dict[str, Any], prefix: str = "") -> str | None:
    """The dotted name of the first field that `value` lacks; sections are looked into."""
    for name, field in model.model_fields.items():
        if value.get(name) is None:
            return prefix + name
        section, table = field.annotation, value[name]
        if isinstance(table, dict) and isinstance(section, type) and issubclass(section, BaseModel):
            if issubclass(section, Choice):
                section = section.named(table.get(section.key)) or section
            if found := _left_out(section, table, f"{prefix}{name}."):
                return found
    return None


class WorkerStatus(Message):
    """A worker that ever registered; `active`: a member, which has neither left nor died."""

    worker_id: str
    incarnation: int
    active: bool
    live: bool
    seconds_since_heard: float
    hostname: str
    telemetry: Telemetry


class RoundStatus(Message):
    round: int
    contributions: int
    tokens: int
    train_loss: float | None
    evaluation_loss: float | None
    digest: str | None
    staleness: int = 0  # the highest of its contributions: rounds since the one it was made for


class GatherStatus(Message):
    """Of a run whose islands publish: the round that closes next, and counts.

    Skips of all rounds are the ledger's; other counts are since the coordinator started.
    """

    primaries: tuple[WorkerName, ...]
    reserves: tuple[WorkerName, ...]  # in the order in which they step in
    skips: dict[str, int]  # of this round, by reason
    all_skips: dict[str, int]  # of all rounds
    accepted: Whole
    reserves_used: Whole
    pulled_bytes: Whole
    overlap: NotNegative | None = None  # the highest of any two contributions to the newest version


class Status(PageOfWorkers):
    """What an operator sees.

    `waiting_for` names the live workers whose contribution the round lacks; of a paused run only
    those that have begun it, since the others are held by the pause.
    """

    run_id: str
    name: str
    state: Literal["waiting", "training", "paused", "finished"]
    version: int
    rounds: int | None
    digest: str
    manifest_sha256: str
    tokens: int
    workers: tuple[WorkerStatus, ...]
    history: tuple[RoundStatus, ...]
    waiting_for: tuple[str, ...]
    refusals: dict[str, int]
    stale_contributions: int
    resyncs: int
    bytes_received: int
    bytes_sent: int
    refused_queues: tuple[str, ...] = ()  # entries that were damaged when the coordinator started
    storage_full: str = ""  # why nothing can be written, while the disk has no room
    damaged: str = ""  # why nobody trains: what ranks would go back to cannot be read
    group: Whole = 0  # of a sharded run: the one that trains; 0: none does
    ring: tuple[WorkerName, ...] = ()  # its members, by rank
    consistent: Whole = 0  # the newest step that all of it have saved
    checkpoint: Whole = 0  # the step of the newest checkpoint
    notes: tuple[str, ...] = ()  # why ranks that ask are in no group, in words
    gather: GatherStatus | None = None


class StatusRequest(PageRequest[Status], route=Route("GET", "/status", large=True)):
    """What an operator sees."""


class ErrorReply(Message):
    """One shape for every refusal."""

    code: str
    message: str
    retry: bool
    generation: Whole | None = None  # of STALE_GENERATION: the one to repeat the message with
