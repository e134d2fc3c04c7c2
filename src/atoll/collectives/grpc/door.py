"""Who is let in to a rank's server: members of its present group, each as itself."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from atoll.collectives.grpc.trust import RankGroup
from atoll.collectives.mailbox import Mailbox
from atoll.collectives.peers import Desk, Source
from atoll.errors import AtollError, Forbidden, NotReady, StaleGeneration

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Present:
    """The group that is trusted, where its messages go, what it may read and where it asks."""

    group: RankGroup
    mailbox: Mailbox | None
    source: Source | None
    desk: Desk | None = None

    @property
    def only_measures(self) -> bool:
        """Whether it is a candidate as yet, whose members do nothing but ping each other."""
        return self.mailbox is None and self.source is None and self.desk is None

    def box(self) -> Mailbox:
        """NotReady while the group only measures."""
        if self.mailbox is None:
            raise NotReady(f"group {self.group.number} only measures as yet; call again")
        return self.mailbox


class Door:
    """The present group of one server. Thread-safe: it is replaced as a whole."""

    def __init__(self) -> None:
        self.present: Present | None = None

    def admitted(
        self, shown: Mapping[str, str], certificate_pem: bytes | None, *, peer: str
    ) -> tuple[Present, int]:
        """The group and which of its ranks calls; raises for anybody else, and logs it."""
        present = self.present
        if present is None:
            raise NotReady("this rank is in no group yet; call again")
        try:
            return present, present.group.sender(shown, certificate_pem)
        except AtollError as error:
            about = {"peer": peer, "code": error.code, "reason": str(error)}
            log.warning("a rank was refused", extra=about)
            # A candidate becomes a group of its number with another secret, which others may have
            # learned before this rank.
            if present.only_measures and isinstance(error, Forbidden):
                raise NotReady(
                    f"group {present.group.number} only measures here as yet; call again"
                ) from error
            raise

    def check(self, present: Present) -> None:
        """A connection outlives the group that it was opened in, its messages do not."""
        now = self.present
        if now is not present:
            number = 0 if now is None else now.group.number
            raise StaleGeneration(
                f"group={present.group.number} of the stream is over; this rank is in {number}",
                present=number,
            )
