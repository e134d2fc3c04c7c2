"""From no group to the next one: ask, measure, ask again."""

import logging
from collections.abc import Callable

from atoll.errors import ProtocolError
from atoll.island.sharded.host import Host
from atoll.island.sharded.talk import Talk
from atoll.island.sharded.watch import WAIT_SECONDS
from atoll.protocol.messages import Identity
from atoll.protocol.sharded import MAX_HELD, GroupReply, GroupRequest, HeldSave

log = logging.getLogger(__name__)


def next_group(
    talk: Talk, host: Host, *, worker_id: str, held: Callable[[], tuple[HeldSave, ...]]
) -> GroupReply | None:
    """The group that this rank trains in next, once it is formed; None when the run is over.

    Tells which saves this rank has, and how far the members of a candidate are when it is asked.
    """
    measured, pings, told = 0, dict[str, float](), ""

    def question(who: Identity) -> GroupRequest:
        return GroupRequest(
            identity=who,
            held=held()[:MAX_HELD],
            launch=host.launch,
            measured=measured,
            pings=pings,
            wait_seconds=WAIT_SECONDS,
        )

    while True:
        reply = talk.ask(question)
        if reply.action == "stop":
            return None
        if reply.reason and reply.reason != told:
            log.warning("no group yet", extra={"reason": reply.reason})
        told = reply.reason
        if reply.action == "train":
            about = {"group": reply.group, "members": [m.worker_id for m in reply.members]}
            log.info("in a group", extra=about)
            return reply
        if reply.action == "measure":
            found = host.measure(reply, rank_of(reply, worker_id))
            measured = reply.group
            pings = {reply.members[to].worker_id: ms for to, ms in found.milliseconds.items()}


def rank_of(reply: GroupReply, worker_id: str) -> int:
    """This rank's number in a group; ProtocolError when it is not in it."""
    names = [member.worker_id for member in reply.members]
    if worker_id not in names:
        raise ProtocolError(
            f"group={reply.group} has members {names}, and worker_id={worker_id!r}, whom the "
            f"coordinator told of it, is not one of them; run the same release on both sides"
        )
    return names.index(worker_id)
