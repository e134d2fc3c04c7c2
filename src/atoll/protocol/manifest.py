"""The manifest: every setting on which the parties of a run must agree, as one frozen value.

It holds settings only, never state and never anything of one machine (paths, addresses, secrets).
Its canonical JSON is stored in the ledger and its sha256 is stamped on every mutating message. No
field is ever null: where a setting has no value, 0 says so and its comment says what that means.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, SerializeAsAny, model_validator

from atoll import canonical
from atoll.codecs import registry as codecs
from atoll.codecs.settings import CodecSettings
from atoll.errors import VersionMismatch
from atoll.optim.settings import NesterovSettings, OuterSettings
from atoll.settings import Count, Fraction, Limit, NotNegative, Positive, Settings

PROTOCOL_VERSION = 1

Word = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class ScheduleSettings(Settings):
    """Learning rate as a function of the run's global tokens, so that late joiners agree."""

    kind: Literal["constant", "cosine", "linear"] = "constant"
    warmup_tokens: Annotated[int, Field(ge=0)] = 0
    total_tokens: Limit = 0  # where a decay ends
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1

    @model_validator(mode="after")
    def _decay_needs_an_end(self) -> "ScheduleSettings":
        if self.kind != "constant" and not self.total_tokens:
            raise ValueError(f"kind={self.kind!r} decays to an end; set total_tokens")
        return self

    def factor(self, tokens: int) -> float:
        """What the base rate is multiplied by after `tokens` of the whole run."""
        if tokens < self.warmup_tokens:
            return (tokens + 1) / (self.warmup_tokens + 1)
        if self.kind == "constant":
            return 1.0
        length = max(1, self.total_tokens - self.warmup_tokens)
        progress = min(1.0, (tokens - self.warmup_tokens) / length)
        shape = 1 - progress if self.kind == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.final_fraction + (1 - self.final_fraction) * shape


class InnerSettings(Settings):
    """What an island does between two syncs."""

    optimizer: Literal["adamw", "sgd"] = "adamw"
    lr: Positive = 1e-3
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.1
    momentum: Fraction = 0.0  # sgd only
    batch: Count = 8  # rows per step: of an island, or of all ranks where they meet at every step
    clip: NotNegative = 1.0  # global gradient norm; 0 switches clipping off
    precision: Literal["fp32", "bf16"] = "fp32"  # of the forward and backward pass
    threads: Annotated[int, Field(ge=1, le=1024)] = 1  # two threads change bits
    schedule: ScheduleSettings = ScheduleSettings()


class MembershipSettings(Settings):
    """Who must be there for a round to open and to close."""

    min_workers: Count = 1
    quorum: Limit = 0  # close once this many are in and grace is over; 0 waits for all
    grace_seconds: NotNegative = 0.0

    @model_validator(mode="after")
    def _quorum_is_not_below_minimum(self) -> "MembershipSettings":
        if 0 < self.quorum < self.min_workers:
            raise ValueError(
                f"quorum={self.quorum} is below min_workers={self.min_workers}; a round never "
                f"closes with fewer than min_workers, so raise quorum"
            )
        return self


class ModelSettings(Settings):
    """The model as data: a definition, and the fingerprint every worker must match."""

    definition: dict[str, Any]
    layout_digest: Sha256
    initial_digest: Sha256  # params digest of the initial weights, which are a blob


class DataSettings(Settings):
    """Which rows the run trains on."""

    definition: dict[str, Any]
    identity: dict[str, Any]


class WorkSettings(Settings):
    """How rows are dispatched."""

    units: Annotated[int, Field(ge=1, le=65536)] = 1024  # of an epoch; at most one for each row
    policy: Literal["exactly_once", "at_most_once"] = "exactly_once"
    lease_seconds: NotNegative = 0.0  # 0: a lease ends with its worker or its round only
    stream_unit_rows: Annotated[int, Field(ge=1, le=2**31)] = 4096


class EvaluateSettings(Settings):
    """Held-out loss of the published weights, every `every` rounds (0: never) and at the end."""

    every: Annotated[int, Field(ge=0)] = 1


class StopSettings(Settings):
    """When the run is finished; at least one of the two. 0 sets no end."""

    rounds: Limit = 0
    tokens: Limit = 0

    @model_validator(mode="after")
    def _has_an_end(self) -> "StopSettings":
        if not self.rounds and not self.tokens:
            raise ValueError("neither rounds nor tokens is set; a run needs an end")
        return self


class StorageSettings(Settings):
    """What is kept, so that replay holds."""

    snapshot_every: Count = 10
    retain: Literal["all", "snapshots"] = "all"
    keep_snapshots: Annotated[int, Field(ge=1)] = 2  # with retain = "snapshots"


class ShardedSettings(Settings):
    """What strategy "sharded" does at every step, and how often it saves; others ignore it."""

    transport: Literal["grpc", "torch_dist"] = "grpc"
    bulk: Literal["grpc", "tcp"] = "grpc"  # what carries the chunks that a gRPC call opened
    exchange: Literal["ring", "direct"] = "ring"
    gradients: Literal["fp32", "int8"] = "fp32"
    parameters: Literal["fp32", "bf16", "int8"] = "fp32"  # as they are gathered; the master is fp32
    residuals: bool = False  # error feedback of lossy gradients
    micro_batches: Count = 1  # of each rank's rows of a step
    offload: Literal["none", "cpu", "disk"] = "none"  # where master, moments and sums are
    save_every: Count = 10  # steps
    checkpoint_every: Count = 10  # saves
    commit: Literal["strict", "quorum"] = "strict"
    deadline_seconds: Positive = 60.0  # of a collective
    onebit_warmup_steps: Limit = 0  # then gradients travel as signs of momentum; 0: never

    @property
    def round_steps(self) -> int:
        """Steps between two checkpoints."""
        return self.save_every * self.checkpoint_every


class BucketSettings(Settings):
    """Where a bucket is. Credentials are never here: each process has its own (AWS_*)."""

    # "memory:" and a directory are for one machine alone.
    url: Annotated[
        str, Field(pattern=r"^(memory:|s3://[^/]{3,}|[^:]*[^:/][^:]*)$", max_length=1024)
    ]
    endpoint: Annotated[str, Field(pattern="^(https?://.*)?$", max_length=1024)] = (
        ""  # of an S3 server; "": Amazon's own
    )
    region: Annotated[str, Field(max_length=64)] = ""  # "": us-east-1


class GatherSettings(Settings):
    """Whom a round of strategy "gather" folds, and where contributions lie; others ignore it."""

    primaries: Limit = 0  # islands that a round folds; more of them are reserves; 0: all
    primary_seconds: NotNegative = 0.0  # a primary not in by then is missing; 0: waits for all live
    pull_seconds: Positive = 60.0  # the most that one object's pull takes
    keep: Count = 8  # rounds that an island leaves in its bucket
    buckets: dict[Word, BucketSettings] = Field(default_factory=dict, max_length=64)  # by name


class Manifest(Settings):
    """The run's settings, whole."""

    settings_authority: Literal["server"] = "server"
    protocol_version: int = PROTOCOL_VERSION
    manifest_version: Count = 1  # counts up: no two versions of a run share a hash
    manifest_source: Literal["file", "operator"] = "file"  # the run file, or a change while serving
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$")]
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    strategy: Word = "diloco"  # what it and those up to `staleness_weighting` mean, its modes know
    mode: Word = "sync"
    sync_every: Count = 1  # a run file in rounds states it; without rounds it means nothing
    num_fragments: Count = 1
    fragment_pattern: Literal["strided", "sequential"] = "strided"  # which blocks go together
    delay_steps: Annotated[int, Field(ge=0)] = 0  # inner steps from a hand-in to its merge
    local_weight: Fraction = 0.0  # of an island's own values in a merge; 0 takes the published
    dylu: bool = False
    max_staleness: Annotated[int, Field(ge=0)] = 8  # rounds; what is older is stale
    staleness_weighting: Literal["equal", "inverse_sqrt"] = "equal"
    weighting: Literal["equal", "tokens"] = "equal"
    upload: SerializeAsAny[CodecSettings] = codecs.DEFAULT
    download: SerializeAsAny[CodecSettings] = codecs.DEFAULT
    heartbeat_interval: Positive = 2.0
    heartbeat_timeout: Positive = 10.0
    membership: MembershipSettings = MembershipSettings()
    outer: SerializeAsAny[OuterSettings] = NesterovSettings()
    inner: InnerSettings = InnerSettings()
    sharded: ShardedSettings = ShardedSettings()
    gather: GatherSettings = GatherSettings()
    model: ModelSettings
    data: DataSettings
    work: WorkSettings = WorkSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    stop: StopSettings
    storage: StorageSettings = StorageSettings()

    @model_validator(mode="before")
    @classmethod
    def _same_protocol(cls, value: Any) -> Any:
        # Before the fields: a newer side's unknown ones would hide the reason.
        if isinstance(value, dict):
            found = value.get("protocol_version", PROTOCOL_VERSION)
            if found != PROTOCOL_VERSION:
                raise VersionMismatch(
                    f"protocol_version={found!r} where this program speaks {PROTOCOL_VERSION}; run "
                    f"the same release of atoll on both sides"
                )
        return value

    @model_validator(mode="after")
    def _heartbeats_fit(self) -> "Manifest":
        if self.heartbeat_interval >= self.heartbeat_timeout:
            raise ValueError(
                f"heartbeat_interval={self.heartbeat_interval} is not below "
                f"heartbeat_timeout={self.heartbeat_timeout}; every worker would be taken for dead"
            )
        return self

    def body(self) -> str:
        """Canonical JSON, as stored and hashed."""
        return canonical.dumps(self.model_dump(mode="json"))

    def sha256(self) -> str:
        """The hash that every mutating message carries."""
        return canonical.sha256(self.model_dump(mode="json"))

    @property
    def rows_per_round(self) -> int:
        """Rows one island trains on in one round."""
        return self.sync_every * self.inner.batch


# What the recorded weights, rows and inner states depend on: the same in every version of a run.
FIXED = (
    "settings_authority",
    "protocol_version",
    "name",
    "seed",
    "strategy",
    "mode",
    "num_fragments",
    "fragment_pattern",
    "delay_steps",
    "local_weight",
    "dylu",
    "max_staleness",
    "staleness_weighting",
    "model",
    "data",
    "work.policy",
    "outer.optimizer",
    "outer.delay",
    "inner.optimizer",
)
VERSION_FIELDS = ("manifest_version", "manifest_source")
ABSENT = "absent"
MAX_DEPTH = 16  # of sections that are looked into; whoever sends them may nest deeper


@dataclass(frozen=True)
class Difference:
    """A field in which two manifests differ."""

    field: str  # dotted
    mine: object
    theirs: object

    @property
    def is_fixed(self) -> bool:
        """Whether no version of a run may change it."""
        if self.field == "storage.retain":
            return self.mine == "snapshots"  # what replay from the start needs may be gone
        return any(self.field == name or self.field.startswith(f"{name}.") for name in FIXED)

    def __str__(self) -> str:
        return f"{self.field}: {self.mine!r} -> {self.theirs!r}"


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Difference]:
    """The settings in which two manifests (as JSON) differ; VERSION_FIELDS do not count."""
    ours, others = dict(leaves(mine)), dict(leaves(theirs))
    names = {*ours, *others} - {*VERSION_FIELDS}
    # Where one side's section is empty, the other side's settings tell more than its name.
    sections = {part for name in names for part in _sections(name)}
    # What both sides state comes first: another optimizer says more than the fields it lacks.
    both = ours.keys() & others.keys()
    return [
        Difference(name, ours.get(name, ABSENT), others.get(name, ABSENT))
        for name in sorted(names - sections, key=lambda name: (name not in both, name))
        if name not in both or not _same(ours[name], others[name])
    ]


def _sections(name: str) -> Iterator[str]:
    """The sections that a setting stands in, by their dotted names."""
    while name := name.rpartition(".")[0]:
        yield name


def leaves(
    table: Mapping[str, Any], prefix: str = "", *, depth: int = MAX_DEPTH
) -> Iterator[tuple[str, object]]:
    """Every setting of a manifest as JSON, by its dotted name."""
    for name, value in table.items():
        if isinstance(value, Mapping) and value and depth:
            yield from leaves(value, f"{prefix}{name}.", depth=depth - 1)
        else:
            yield f"{prefix}{name}", value


def _same(mine: object, theirs: object) -> bool:
    # True is no 1, but a float may have lost its point on the way.
    return mine == theirs and isinstance(mine, bool) == isinstance(theirs, bool)
