"""What an operator asks of a run, and how islands learn of it and answer."""

from typing import Literal

from atoll.protocol.fields import Message, Whole, WorkerName
from atoll.protocol.manifest import OuterRate

Action = Literal["run", "pause", "stop"]


class Command(Message):
    """What the operator wants now; `number` counts the commands of the run."""

    number: Whole = 0
    action: Action = "run"


class ControlRequest(Message):
    """`run` resumes, `pause` hands out no more rounds, `stop` ends the run after this round."""

    action: Action


class KickRequest(Message):
    """A worker that goes, and stays away until it is allowed again."""

    worker_id: WorkerName


class ControlReply(Message):
    """The command in force, who has acknowledged it, and who is kept out."""

    command: Command
    acknowledged: tuple[str, ...]
    missing: tuple[str, ...]
    kicked: tuple[str, ...]


class OuterRateRequest(Message):
    """A new outer learning rate, from the next round that is not planned yet."""

    lr: OuterRate


class OuterRateReply(Message):
    lr: float
    from_round: Whole
    manifest_sha256: str
