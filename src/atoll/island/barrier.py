"""Waiting for the other members of a generation, with a deadline that names who is missing."""

from atoll.clock import Clock
from atoll.errors import BarrierTimeout
from atoll.island.link.base import Link
from atoll.protocol.messages import BarrierRequest, Identity

POLL_SECONDS = 20.0  # of one request; well below any proxy's idle limit


def wait(
    link: Link, identity: Identity, name: str, *, clock: Clock, timeout_seconds: float
) -> None:
    """Returns once every member of `identity.generation` has come to barrier `name`.

    BarrierTimeout names the members that did not; StaleGeneration when the membership changed,
    after which ranks and addresses are other ones and the caller has to begin anew.
    """
    deadline = clock.now() + timeout_seconds
    while True:
        left = max(0.0, deadline - clock.now())
        request = BarrierRequest(identity=identity, wait_seconds=min(POLL_SECONDS, left))
        reply = link.barrier(name, request)
        if reply.complete:
            return
        if clock.now() >= deadline:
            raise BarrierTimeout(
                f"barrier {name!r} of generation {reply.generation} waited {timeout_seconds:.0f} s "
                f"for {list(reply.missing)}; see whether they are alive, then arrive again"
            )
