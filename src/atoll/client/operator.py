"""What an operator's tools ask of a coordinator; all of it needs the admin role."""

from atoll.island.link.network import NetworkLink
from atoll.protocol.control import (
    Action,
    ControlReply,
    ControlRequest,
    KickRequest,
    OuterRateReply,
    OuterRateRequest,
)


class Operator:
    """Control of a run over its link."""

    def __init__(self, link: NetworkLink) -> None:
        self._link = link

    def control(self) -> ControlReply:
        """The command in force, and who knows of it."""
        return self._link.ask("GET", "/control", None, ControlReply)

    def order(self, action: Action) -> ControlReply:
        """Run, pause or stop."""
        return self._link.ask("POST", "/control", ControlRequest(action=action), ControlReply)

    def kick(self, worker_id: str) -> ControlReply:
        """Takes a worker out and keeps it out."""
        request = KickRequest(worker_id=worker_id)
        return self._link.ask("POST", "/control/kick", request, ControlReply)

    def allow(self, worker_id: str) -> ControlReply:
        """Lets a worker in again."""
        request = KickRequest(worker_id=worker_id)
        return self._link.ask("POST", "/control/allow", request, ControlReply)

    def set_outer_lr(self, lr: float) -> OuterRateReply:
        """A new outer learning rate from a later round on."""
        return self._link.ask("POST", "/control/outer-lr", OuterRateRequest(lr=lr), OuterRateReply)
