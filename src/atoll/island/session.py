"""Who this island is to its coordinator: registration, identity, calls that outlive absences."""

import contextlib
import logging
import socket
from collections.abc import Callable
from typing import TypeVar

from atoll.errors import UnknownWorker
from atoll.island.link import Link
from atoll.island.reconnect import Backoff, Reconnect
from atoll.island.store import IslandIdentity
from atoll.protocol.messages import Identity, Info, RegisterRequest

log = logging.getLogger(__name__)

T = TypeVar("T")


class Session:
    """One island's standing with one coordinator."""

    def __init__(self, link: Link, island: IslandIdentity, reconnect: Reconnect) -> None:
        self.link = link
        self.island = island
        self.info: Info = reconnect.call(link.info)
        self._reconnect = reconnect
        self.version = self.info.version  # the coordinator's, when it last registered us
        self._incarnation = 0
        self._request: RegisterRequest | None = None

    @property
    def is_registered(self) -> bool:
        return self._incarnation > 0

    @property
    def incarnation(self) -> int:
        """Which life of this worker_id this process is."""
        return self._incarnation

    def identity(self) -> Identity:
        """What every mutating message carries."""
        return Identity(
            run_id=self.info.run_id,
            manifest_sha256=self.info.manifest_sha256,
            worker_id=self.island.worker_id,
            incarnation=self._incarnation,
            island_key=self.island.island_key,
        )

    def register(self, *, layout_digest: str, data_identity: dict[str, object]) -> None:
        """Takes part from now on; the coordinator refuses another model or other data by name."""
        self._request = RegisterRequest(
            run_id=self.info.run_id,
            manifest_sha256=self.info.manifest_sha256,
            worker_id=self.island.worker_id,
            island_key=self.island.island_key,
            hostname=socket.gethostname()[:255],
            layout_digest=layout_digest,
            data_identity=data_identity,
        )
        self._register(self._request)

    def _register(self, request: RegisterRequest) -> None:
        reply = self._reconnect.call(lambda: self.link.register(request))
        self._incarnation = reply.incarnation
        self.version = reply.version
        log.info(
            "registered",
            extra={"worker": self.island.worker_id, "incarnation": reply.incarnation},
        )

    def call(self, work: Callable[[], T]) -> T:
        """Repeats `work` while the coordinator is away; registers again when it forgot us."""
        while True:
            try:
                return self._reconnect.call(work)
            except UnknownWorker:
                if self._request is None:
                    raise
                log.warning("the coordinator does not know this island, registering again")
                self._register(self._request)

    def backoff(self) -> Backoff:
        """Pauses between tries of something that `call` does not repeat."""
        return self._reconnect.backoff()

    def leave_once(self) -> None:
        """Says goodbye with one try."""
        if self.is_registered:
            self.link.leave(self.identity())
            self._incarnation = 0

    def leave(self) -> None:
        """Takes part no more; harmless when repeated."""
        if self.is_registered:
            # Unknown: an earlier try got through and its answer was lost.
            with contextlib.suppress(UnknownWorker):
                self._reconnect.call(lambda: self.link.leave(self.identity()))
            self._incarnation = 0
