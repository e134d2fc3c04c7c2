"""Links of tests: what a message is called, and a link that answers by methods of these names."""

from typing import Any

from atoll.island.link.base import Traffic
from atoll.protocol.exchange import Ask
from atoll.protocol.messages import (
    AssignmentRequest,
    EvaluationReport,
    HeartbeatRequest,
    InfoRequest,
    LeaveRequest,
    RegisterRequest,
)
from atoll.protocol.samples import SamplesRequest

NAMES: dict[type[Ask[Any]], str] = {
    InfoRequest: "info",
    RegisterRequest: "register",
    AssignmentRequest: "assignment",
    EvaluationReport: "evaluation",
    HeartbeatRequest: "heartbeat",
    SamplesRequest: "samples",
    LeaveRequest: "leave",
}


class Answering:
    """A link whose `send` asks its own method of the message's name."""

    traffic = Traffic()
    sent_alone = 0

    def send(self, message: Ask[Any], *, alone: bool = False) -> Any:
        self.sent_alone += alone
        return getattr(self, NAMES[type(message)])(message)
