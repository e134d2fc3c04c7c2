"""What an operator asks of a run, and how islands learn of it and answer."""

from typing import Literal

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


class CommandRequest(Ask[ControlReply], route=Route("GET", "/control", sender="admin")):
    """Which command is in force?"""


class ControlRequest(Ask[ControlReply], route=Route("POST", "/control", sender="admin")):
    """`run` resumes, `pause` hands out no more rounds, `stop` ends the run after this round."""

    action: Action


class KickRequest(Ask[ControlReply], route=Route("POST", "/control/kick", sender="admin")):
    """Take this worker out of the run, and refuse it until it is allowed again."""

    worker_id: WorkerName


class AllowRequest(Ask[ControlReply], route=Route("POST", "/control/allow", sender="admin")):
    """Let a kicked worker register again."""

    worker_id: WorkerName


class OuterRateReply(Message):
    lr: float
    from_round: Whole
    manifest_sha256: str


class OuterRateRequest(
    Ask[OuterRateReply], route=Route("POST", "/control/outer-lr", sender="admin")
):
    """A new outer learning rate, from the next round that is not planned yet."""

    lr: OuterRate
