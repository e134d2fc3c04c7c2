"""What an operator asks of a run, and how islands learn of it and answer."""

from typing import ClassVar, Literal

from atoll.optim.settings import OuterRate
from atoll.protocol.exchange import Ask, Route
from atoll.protocol.fields import Message, Whole, WorkerName

Action = Literal["run", "pause", "stop"]


class Command(Message):
    """What the operator wants now; `number` counts the commands of the run."""

    number: Whole = 0
    action: Action = "run"


class ControlReply(Message):
    """The command in force, who has acknowledged it, and who is kept out."""

    command: Command
    acknowledged: tuple[str, ...]
    missing: tuple[str, ...]
    kicked: tuple[str, ...]


class CommandRequest(Ask[ControlReply]):
    """Which command is in force?"""

    route: ClassVar[Route] = Route("GET", "/control", sender="admin")


class ControlRequest(Ask[ControlReply]):
    """`run` resumes, `pause` hands out no more rounds, `stop` ends the run after this round."""

    route: ClassVar[Route] = Route("POST", "/control", sender="admin")

    action: Action


class KickRequest(Ask[ControlReply]):
    """Take this worker out of the run, and refuse it until it is allowed again."""

    route: ClassVar[Route] = Route("POST", "/control/kick", sender="admin")

    worker_id: WorkerName


class AllowRequest(Ask[ControlReply]):
    """Let a kicked worker register again."""

    route: ClassVar[Route] = Route("POST", "/control/allow", sender="admin")

    worker_id: WorkerName


class OuterRateReply(Message):
    lr: float
    from_round: Whole
    manifest_sha256: str


class OuterRateRequest(Ask[OuterRateReply]):
    """A new outer learning rate, from the next round that is not planned yet."""

    route: ClassVar[Route] = Route("POST", "/control/outer-lr", sender="admin")

    lr: OuterRate
