"""The leader's link as every rank of an island sees it: one call, one answer or error for all.

So session, reconnection and the training loop run unchanged on all ranks, in step. Followers hold
no connection, no token and no island key; what they pass as a request is not looked at.
"""

from typing import TypeVar

from pydantic import BaseModel

from atoll.errors import AtollError
from atoll.island.link.base import Attendance, Download, FrameSource, Link, Work
from atoll.island.ranks.group import Group
from atoll.protocol.exchange import Ask
from atoll.protocol.messages import Identity
from atoll.traffic import Traffic

R = TypeVar("R", bound=BaseModel)


class LedLink:
    """Fulfils `link.Link`; `link` is the real one on the leader and None on followers.

    What is sent in step is sent by the training threads; the leader's own calls by any thread.
    """

    def __init__(self, group: Group, link: Link | None) -> None:
        self._group = group
        self._link = link
        self.traffic = Traffic() if link is None else link.traffic

    def send(self, message: Ask[R], *, alone: bool = False) -> R:
        """The leader's message; its answer is every rank's, unless it sends alone."""
        if alone or message.route.leader_alone:
            return self._real.send(message)
        said = self._group.lead(lambda: self._real.send(message).model_dump_json())
        return message.reply().model_validate_json(said)

    def attend(self, identity: Identity) -> Attendance:
        """The leader's alone, from a thread of its own."""
        return self._real.attend(identity)

    def upload(self, identity: Identity, frame: FrameSource, *, before_commit: Work) -> str:
        """The leader's alone: called within `lead`."""
        return self._real.upload(identity, frame, before_commit=before_commit)

    def download(self, wanted: Download) -> None:
        """The leader's alone: called within `lead`."""
        self._real.download(wanted)

    def close(self) -> None:
        """Closes the leader's connections."""
        if self._link is not None:
            self._link.close()

    @property
    def _real(self) -> Link:
        if self._link is None:
            raise AtollError(
                f"rank {self._group.rank} holds no link to the coordinator; only the leader calls"
            )
        return self._link
