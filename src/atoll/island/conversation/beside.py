"""What goes on beside the training: heartbeats with what was measured, and the presence stream."""

import logging
from collections.abc import Callable
from typing import TypeVar

from atoll.errors import ManifestMismatch, StoreError
from atoll.island.conversation.intents import Steps, attend, send
from atoll.island.conversation.session import Session
from atoll.island.link.base import Attendance
from atoll.island.telemetry import Samples
from atoll.protocol.control import Command
from atoll.protocol.messages import HeartbeatRequest, Identity, Telemetry
from atoll.protocol.samples import SamplesRequest

log = logging.getLogger(__name__)

MAX_BEATS = 2  # one tells of a new command, the next acknowledges it; a still newer one waits
MAX_DELIVERIES = 4  # batches of samples with one heartbeat, so that a backlog cannot delay the next

T = TypeVar("T")


class Beside:
    """What the leader says beside its training; one thread calls `beat`, another `attend`."""

    def __init__(
        self, session: Session, telemetry: Callable[[], Telemetry], samples: Samples
    ) -> None:
        self._session = session
        self._telemetry = telemetry
        self._samples = samples
        self._samples_life = 0  # the incarnation of the first delivery: it outlives evictions
        self._command = Command()
        self._manifest: str | None = None  # the one in force, where the training has an older one

    def beat(self) -> Steps[None]:
        """One heartbeat; nothing before the island has registered and after it has left."""
        if self._session.is_registered:
            yield from self._try_once(self._beat)

    def attend(self) -> Steps[Attendance | None]:
        """Opens the presence stream; None before and after the run."""
        if not self._session.is_registered:
            return None
        return (yield from self._try_once(attend))

    def _try_once(self, speak: Callable[[Identity], Steps[T]]) -> Steps[T]:
        """One try under the manifest that is in force now.

        A new version is taken over between two rounds; until then only what goes on beside the
        training knows of it, so that a long step is not taken for a death.
        """

        def make() -> Steps[T]:
            return speak(self._session.standing.identity(self._manifest))

        try:
            return (yield from self._session.try_once(make))
        except ManifestMismatch:
            self._manifest = yield from self._session.look()
        return (yield from self._session.try_once(make))

    def _beat(self, identity: Identity) -> Steps[None]:
        for _ in range(MAX_BEATS):
            told, known = self._telemetry(), self._command.number
            beat = HeartbeatRequest(identity=identity, telemetry=told, acknowledged=known)
            reply = yield from send(beat)
            self._session.standing.told(reply.generation)
            if reply.command == self._command:
                break
            self._command = reply.command
            log.info("the operator asks", extra={"action": reply.command.action})
            identity = self._session.standing.identity(self._manifest)
        yield from self._deliver(identity)

    def _deliver(self, identity: Identity) -> Steps[None]:
        """Hands in what was measured; what does not arrive is sent again with a later beat."""
        self._samples_life = self._samples_life or identity.incarnation
        for _ in range(MAX_DELIVERIES):
            batch = self._samples.batch()
            if not batch:
                return
            found = SamplesRequest(identity=identity, life=self._samples_life, samples=batch)
            try:
                yield from send(found)
            except StoreError as error:
                # The beat before it was heard; only figures wait.
                log.warning("telemetry waits", extra={"code": error.code, "reason": str(error)})
                return
            self._samples.delivered(batch[-1].sequence)
