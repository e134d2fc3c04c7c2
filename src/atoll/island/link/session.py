"""Who this island is to its coordinator: registration, identity, calls that outlive absences."""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from typing import TypeVar

from atoll.codecs import registry as codecs
from atoll.errors import (
    AtollError,
    CoordinatorUnreachable,
    Fenced,
    ManifestMismatch,
    StaleGeneration,
    UnknownWorker,
)
from atoll.island.link import adoption
from atoll.island.link.base import Link
from atoll.island.link.reconnect import Backoff, Reconnect
from atoll.island.ranks.group import SOLO, Group
from atoll.island.state.store import IslandIdentity
from atoll.protocol.messages import Identity, Info, InfoRequest, LeaveRequest, RegisterRequest

log = logging.getLogger(__name__)

MAX_ADOPTIONS = 100  # in a row, for one message; more is no churn but a fault

T = TypeVar("T")


class Session:
    """One island's standing with one coordinator.

    One thread trains and uses `register`, `call` and `leave`; others beside it use `try_once`,
    `identity` and `look`. `info` is the newest manifest that this island knows of; what a round is
    trained under is the run's affair.

    The sessions of a group's ranks make the same calls in the same order. The leader's may move on
    beside its training or while it sends, so wherever a rank's own standing would decide what is
    called next, the leader's does.
    """

    def __init__(
        self,
        link: Link,
        island: IslandIdentity,
        reconnect: Reconnect,
        *,
        group: Group = SOLO,
    ) -> None:
        self.link = link
        self.island = island
        self.info: Info = reconnect.call(lambda: link.send(InfoRequest()))
        self._reconnect = reconnect
        self.version = self.info.version  # the coordinator's, when it last registered us
        self.generation = 0  # the membership we know; whoever says otherwise is believed
        self._incarnation = 0
        self._request: RegisterRequest | None = None
        self._away = False  # whether the last call found nobody
        self._unanswered = False  # whether a registration may have begun a life we do not know of
        self._group = group
        self._refreshing = threading.Lock()
        # Beside the training thread nobody waits for it, or waits for anything while holding it:
        # the simulator's fibers would never give it back.
        self._joining = threading.Lock()

    @property
    def is_registered(self) -> bool:
        return self._incarnation > 0

    @property
    def incarnation(self) -> int:
        """Which life of this worker_id this process is."""
        return self._incarnation

    def identity(self, manifest_sha256: str | None = None) -> Identity:
        """What every mutating message carries; by default under the newest manifest known."""
        return Identity(
            run_id=self.info.run_id,
            manifest_sha256=manifest_sha256 or self.info.manifest_sha256,
            worker_id=self.island.worker_id,
            incarnation=self._incarnation,
            island_key=self.island.island_key,
            generation=self.generation,
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
            codec_versions=codecs.versions(),
        )
        self._join(self._incarnation)

    def _join(self, life: int) -> None:
        """Collective: every rank is in the leader's life, a later one than the leader's `life`."""

        def work() -> tuple[int, int, int]:
            with self._joining:
                # Not again where another thread has registered meanwhile.
                if self._incarnation == life:
                    self._register()
            return self._incarnation, self.generation, self.version

        self._incarnation, self.generation, self.version = self._reconnect.call(
            lambda: self._under_newest(lambda: self._group.lead(work))
        )

    def _register(self, *, alone: bool = False) -> None:
        assert self._request is not None
        request = self._request.model_copy(
            update={
                "manifest_sha256": self.info.manifest_sha256,
                "settings": self.info.manifest().model_dump(mode="json"),
            }
        )
        try:
            reply = self.link.send(request, alone=alone)
        except AtollError as error:
            # A coordinator that lost its ledger or disk does not know either what was recorded.
            self._unanswered = self._unanswered or error.retry
            raise
        self._unanswered = False
        self._incarnation = reply.incarnation
        self.generation = reply.generation
        self.version = reply.version
        log.info(
            "registered",
            extra={"worker": self.island.worker_id, "incarnation": reply.incarnation},
        )

    def call(self, work: Callable[[], T]) -> T:
        """Repeats `work` while the coordinator is away; registers again when it forgot us.

        `work` makes its identity anew each time, since incarnation and generation may move on.
        """
        while True:
            life = self._incarnation
            try:
                return self._reconnect.call(
                    lambda: self._under_newest(lambda: self._adopting(work))
                )
            except (UnknownWorker, Fenced) as error:
                self._come_back(life, error)

    def _come_back(self, life: int, error: AtollError) -> None:
        """Collective: registers again where `error`, met in the leader's `life`, says we are out.

        We may also be fenced by ourselves: another thread of this process registered again
        meanwhile, whose answer is waited for here, or tried to and got no answer. Else raises it.
        """

        def is_over() -> bool:
            with self._joining:
                by_another = isinstance(error, Fenced) and not self._unanswered
                return self._incarnation == life and (by_another or self._request is None)

        if self._group.lead(is_over):
            raise error
        log.warning("registering again", extra={"reason": str(error)})
        self._join(life)

    def try_once(self, work: Callable[[], T]) -> T:
        """One try of `work` from a thread beside the training; registers again when we are out.

        So an island that was evicted during a long step is back before the step ends. In a group
        only the leader knocks; the other ranks need its new life no sooner than `call` tells them.
        """
        life = self._incarnation
        try:
            return self._adopting(work)
        except UnknownWorker as error:
            if not self._joining.acquire(blocking=False):
                raise
            try:
                if self._request is None:  # it is leaving
                    raise
                if self._incarnation == life:
                    log.warning("registering again", extra={"reason": str(error)})
                    self._register_beside()
            finally:
                self._joining.release()
            return self._adopting(work)

    def _register_beside(self) -> None:
        def register() -> None:
            self._register(alone=True)

        # A fresh look at the settings is for all ranks of a group, from their training threads.
        register() if self._group.size > 1 else self._under_newest(register)

    def _adopting(self, work: Callable[[], T]) -> T:
        """Repeats `work` at once in the generation that a refusal names: nothing was read of it."""
        for _ in range(MAX_ADOPTIONS):
            try:
                return work()
            except StaleGeneration as stale:
                self.generation = stale.present
        return work()

    def backoff(self) -> Backoff:
        """Pauses between tries of something that `call` does not repeat."""
        return self._reconnect.backoff()

    def refresh(self) -> bool:
        """Asks for the settings again; whether a recorded new version is known now.

        ManifestMismatch when the coordinator now states something that no version may change.
        """
        with self._refreshing:
            found = self.link.send(InfoRequest())
            adoption.check(self.info, found)
            moved = found.manifest_sha256 != self.info.manifest_sha256
            self.info = found
        if moved:
            log.info(
                "a new manifest version is recorded",
                extra={"version": found.manifest_version, "manifest": found.manifest_sha256},
            )
        return moved

    def look(self) -> str:
        """The hash of the manifest in force, without taking it over; from any thread.

        ManifestMismatch as `refresh` raises it.
        """
        found = self.link.send(InfoRequest(), alone=True)
        adoption.check(self.info, found)
        return found.manifest_sha256

    def _under_newest(self, work: Callable[[], T]) -> T:
        """`work`, after a fresh look at the settings where the coordinator was away or says so."""
        if self._away:
            self.refresh()
            self._away = False
        while True:
            known = self.info.manifest_sha256
            try:
                return work()
            except CoordinatorUnreachable:
                # Not where ranks go in step: a call may be the leader's alone. They learn of a
                # new version by the refusal of the old one.
                self._away = self._group.size == 1
                raise
            except ManifestMismatch:
                # Another thread may have heard of it before; a refusal of the newest is final.
                self.refresh()
                if not self._knows_newer(known):
                    raise

    def _knows_newer(self, known: str) -> bool:
        """Collective: whether the leader knows of another manifest than it did before."""
        return bool(self._group.lead(lambda: self.info.manifest_sha256 != known))

    def leave_once(self) -> None:
        """Says goodbye with one try."""
        if self.is_registered:
            self._come_back_no_more()
            self._adopting(self._say_goodbye)
            self._incarnation = 0

    def leave(self) -> None:
        """Takes part no more; harmless when repeated."""
        if self.is_registered:
            self._come_back_no_more()
            # Unknown: an earlier try got through and its answer was lost. Fenced: what there is to
            # leave is another life's.
            with contextlib.suppress(UnknownWorker, Fenced):
                self._reconnect.call(
                    lambda: self._under_newest(
                        lambda: self._adopting(
                            lambda: self.link.send(LeaveRequest(identity=self.identity()))
                        )
                    )
                )
            self._incarnation = 0

    def _say_goodbye(self) -> None:
        self.link.send(LeaveRequest(identity=self.identity()))

    def _come_back_no_more(self) -> None:
        with self._joining:
            self._request = None
