"""Messages of a sharded run: how ranks become a group, what they save, and where they meet.

A *group* is an ordered membership that trains together, numbered by the generation in which it was
formed. A *round* is the steps between two checkpoints. Who trains which rows of a step follows from
its number and the rank, so no message names them one by one.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from atoll.protocol.exchange import Ask, Route, Waiting
from atoll.protocol.fields import AtMost, Message, NotNegative, Number, Whole, WorkerName
from atoll.protocol.manifest import Sha256
from atoll.protocol.messages import Identity
from atoll.rows import RowRange

MAX_RANKS = 1024
MAX_HELD = 8
Certificate = Annotated[str, Field(max_length=8192)]  # PEM; empty without TLS
Rank = Annotated[int, Field(strict=True, ge=0, lt=MAX_RANKS)]
MAX_LATE = 16_384  # of a round
_NAMES_BYTES = 128 << 10  # 1,024 names of 64 letters, each with a ping
_LATE_BYTES = 512 << 10  # 16,384 late ranks of 29 letters
# As `rows.Late`: a step, a rank whose rows are not in it, and of how many ranks it was one.
LateRank = tuple[Whole, Rank, Annotated[int, Field(strict=True, ge=1, le=MAX_RANKS)]]


class RankMember(Message):
    """A rank as the others dial it."""

    worker_id: WorkerName
    address: str  # host:port
    certificate: Certificate = ""


class Launch(Message):
    """Which process of which torchrun launch a rank is.

    With `transport = "torch_dist"` a group is all processes of one launch, by these ranks. The id
    is drawn when the processes start, so those of a restart are another launch.
    """

    id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    rank: Rank
    size: Annotated[int, Field(strict=True, ge=1, le=MAX_RANKS)]

    @model_validator(mode="after")
    def _check_rank(self) -> Self:
        if self.rank >= self.size:
            raise ValueError(
                f"rank={self.rank} of a launch of {self.size}: ranks go from 0 to {self.size - 1}"
            )
        return self


class HeldSave(Message):
    """A save on an island's disk: its shard of that step, and that of the rank before it."""

    step: Whole
    group: Whole  # in which it was saved
    rank: Rank  # of this island in that group
    own: Sha256
    predecessor: Sha256


class Restore(Message):
    """What all ranks of a new group load before they go on.

    `initial`: the blob `parts[0]` of the initial weights, from byte `offset` on fp32 in the order
    of the layout; moments are zero. `checkpoint`: blobs, one for each rank of the group that saved
    it, by the sha256 that `Fetch` takes; `roots` are the hashes of their saves, under which `Fetch`
    gives those of their chunks. `save`: parts on the disks of ranks, by the hashes of
    their saves; `holders` says for each part which ranks of the new group have it.
    """

    source: Literal["initial", "save", "checkpoint"]
    step: Whole  # the last one that is in it
    group: Whole = 0  # that saved it; 0: not told
    size: Whole = 1  # ranks that it is cut for
    parts: tuple[Sha256, ...]
    roots: tuple[Sha256, ...] = ()
    offset: Whole = 0  # bytes of each part before its first element
    holders: tuple[tuple[Rank, ...], ...] = ()
    tokens: Whole = 0  # of the run, up to that step


class Interval(Message):
    """The steps between two checkpoints, and their rows: step by step, in this order."""

    round: Whole
    first: Whole  # step
    last: Whole
    ranges: tuple[RowRange, ...]
    tokens: Whole  # of the run before it, which its learning rates start from
    manifest_sha256: Sha256


class GroupReply(Message):
    """`wait`: ask again. `measure`: ping these members and ask again with what was found.

    `train`: restore, and go on with the step after it. `stop`: the run is over. A candidate to
    `measure` has a secret of its own and an order that is not the ring's yet.
    """

    action: Literal["wait", "measure", "train", "stop"]
    group: Whole = 0  # of `measure` a candidate's number
    members: tuple[RankMember, ...] = ()  # by rank
    secret: str = ""
    restore: Restore | None = None
    intervals: tuple[Interval, ...] = ()  # those that are planned and not committed, oldest first
    reason: str = ""


class GroupRequest(
    Waiting[GroupReply], route=Route("POST", "/workers/{worker_id}/group", body_bytes=_NAMES_BYTES)
):
    """Which group am I in? Asked by a rank without one, and by one that watches its own.

    Held back until the answer is another one than `group`. Who has entered a group asks with its
    number until the answer is another; who gives it up for a reason of its own registers again,
    which ends the group for all.
    """

    identity: Identity
    group: Whole = 0  # that the sender is in; 0: none
    held: Annotated[tuple[HeldSave, ...], AtMost(MAX_HELD)] = ()
    launch: Launch | None = None  # of a rank that torchrun started, where only those make a group
    measured: Whole = 0  # the candidate that `pings` are of
    # In ms; who is absent was missed.
    pings: Annotated[dict[WorkerName, NotNegative], AtMost(MAX_RANKS)] = Field(default_factory=dict)

    def is_answered(self, reply: GroupReply) -> bool:
        """Whether something is to be done."""
        if reply.action == "measure":
            return reply.group != self.measured
        if reply.action == "train":
            return reply.group != self.group
        return reply.action == "stop" or (self.group != 0 and reply.group != self.group)


class SaveReply(Message):
    """The newest step that all members of the group have saved; earlier saves may go."""

    consistent: Whole


class SaveReport(Ask[SaveReply], route=Route("POST", "/workers/{worker_id}/save")):
    """The sender's shard of a step, and its predecessor's, are on its disk, synced."""

    identity: Identity
    save: HeldSave


class PartReply(Message):
    """Whether the checkpoint that the part belongs to is committed."""

    committed: bool


class PartReport(
    Waiting[PartReply], route=Route("POST", "/workers/{worker_id}/part", body_bytes=_LATE_BYTES)
):
    """The sender's part of a round's checkpoint is uploaded; held back until it is committed."""

    identity: Identity
    group: Whole
    round: Whole
    step: Whole
    part: Sha256  # the save's hash; the blob was uploaded under it
    blob: Sha256
    loss_sum: Number  # over `tokens`: of all ranks and all steps of the round
    tokens: Whole
    evaluation_loss: Number = 0.0  # the sender's share of the held-out loss, as a sum
    evaluation_tokens: Whole = 0
    late: Annotated[tuple[LateRank, ...], AtMost(MAX_LATE)] = ()  # by step and rank

    def is_answered(self, reply: PartReply) -> bool:
        """Whether it is committed."""
        return reply.committed


class BoundaryReply(Message):
    """`go` on with the interval; `regroup`: ask for a group again; `stop`: the run is over."""

    action: Literal["wait", "go", "regroup", "stop"]
    interval: Interval | None = None


class BoundaryRequest(Waiting[BoundaryReply], route=Route("POST", "/workers/{worker_id}/boundary")):
    """The sender has made the last step of a round. The answer is the same for all of its group.

    Held back until the round before it is committed, and for `regroup` and `stop` until it is.
    """

    identity: Identity
    group: Whole
    round: Whole

    def is_answered(self, reply: BoundaryReply) -> bool:
        """Whether the sender knows how to go on."""
        return reply.action != "wait"


class MissingReply(Message):
    """Heard; the group goes on, or ends, as `GroupRequest` tells."""

    ok: Literal[True] = True


class MissingReport(
    Ask[MissingReply], route=Route("POST", "/workers/{worker_id}/missing", body_bytes=_NAMES_BYTES)
):
    """Ranks of the group that the sender did not reach until the deadline."""

    identity: Identity
    group: Whole
    step: Whole
    missing: Annotated[tuple[WorkerName, ...], Field(min_length=1), AtMost(MAX_RANKS)]
