"""Calls that outlive absences, evictions and new manifests: what stands around every message."""

import contextlib
import logging
import random
from collections.abc import Callable
from typing import Any, TypeVar

from atoll.errors import (
    AtollError,
    CoordinatorUnreachable,
    Fenced,
    ManifestMismatch,
    StaleGeneration,
    UnknownWorker,
)
from atoll.island.conversation import adoption
from atoll.island.conversation.backoff import repeated
from atoll.island.conversation.intents import Pause, Steps, decided, led, send
from atoll.island.conversation.standing import Adopted, Standing
from atoll.island.gather.signing import Signing
from atoll.island.ranks.group import SOLO, Group
from atoll.island.state.store import IslandIdentity
from atoll.protocol.messages import Done, Info, InfoRequest, LeaveRequest

log = logging.getLogger(__name__)

MAX_ADOPTIONS = 100  # in a row, for one message; more is no churn but a fault
JOINING_SECONDS = 0.05  # how often it is looked whether another thread's registration is answered

T = TypeVar("T")
Make = Callable[[], Steps[T]]  # makes its messages anew each time: the standing may have moved on


def look(jitter: random.Random) -> Steps[Info]:
    """The run's settings, as soon as the coordinator is there."""
    return (yield from repeated(lambda: send(InfoRequest()), jitter))


class Session:
    """One island's conversation with one coordinator, apart from what it trains.

    The training goes through `register`, `call` and `leave`; what goes on beside it uses `try_once`
    and `look`. `adopted` are the settings of the round under way, which the rounds move on.

    The ranks of a group go the same steps in the same order. The leader's standing may move on
    beside its training or while it sends, so wherever a rank's own standing would decide what comes
    next, the leader's does.
    """

    def __init__(
        self, island: IslandIdentity, info: Info, jitter: random.Random, *, group: Group = SOLO
    ) -> None:
        self.standing = Standing(island, info)
        self.adopted = Adopted.of(info)
        self.jitter = jitter
        self.group = group
        self.signing: Signing | None = None  # of the leader, where islands publish into buckets
        self._joins_as: dict[str, Any] | None = None  # the model and data it registers with
        self._is_away = False  # whether the last call found nobody

    @property
    def is_registered(self) -> bool:
        return self.standing.incarnation > 0

    # Registration

    def register(
        self, *, layout_digest: str, data_identity: dict[str, Any], **listens: Any
    ) -> Steps[None]:
        """Takes part from now on; the coordinator refuses another model or other data by name.

        A worker that others dial says where it `listens`, and with which certificate. One that
        publishes says into which bucket, and with which key it signs.
        """
        self._joins_as = {"layout_digest": layout_digest, "data_identity": data_identity, **listens}
        if self.signing is not None:
            self._joins_as["publishes"] = self.signing.publisher()
        yield from self._join(self.standing.incarnation)

    def register_again(self) -> Steps[None]:
        """Begins a new life, unless another thread just has."""
        yield from self._join(self.standing.incarnation)

    def _join(self, life: int) -> Steps[None]:
        """Collective: the leader registers, unless its `life` is over; all ranks take its place."""

        def join() -> Steps[tuple[int, int, int]]:
            while not self.standing.joining.acquire(blocking=False):
                yield Pause(JOINING_SECONDS)
            try:
                # Not again where another thread has registered meanwhile.
                if self.standing.incarnation == life:
                    yield from self._register()
            finally:
                self.standing.joining.release()
            return self.standing.place

        place = yield from repeated(lambda: self._under_newest(lambda: led(join)), self.jitter)
        self.standing.move(*place)

    def _register(self, *, alone: bool = False) -> Steps[None]:
        assert self._joins_as is not None
        try:
            reply = yield from send(self.standing.registration(**self._joins_as), alone=alone)
        except AtollError as error:
            # A coordinator that lost its ledger or disk does not know either what was recorded.
            self.standing.is_doubtful = self.standing.is_doubtful or error.retry
            raise
        self.standing.joined(reply)
        worker = self.standing.island.worker_id
        log.info("registered", extra={"worker": worker, "incarnation": reply.incarnation})

    def _come_back(self, life: int, error: AtollError) -> Steps[None]:
        """Collective: registers again where `error`, met in the leader's `life`, says we are out.

        We may also be fenced by ourselves: another thread of this process registered again
        meanwhile, whose answer is waited for here, or tried to and got no answer. Else raises it.
        """

        def is_over() -> Steps[bool]:
            while self.standing.joining.locked():
                yield Pause(JOINING_SECONDS)
            by_another = isinstance(error, Fenced) and not self.standing.is_doubtful
            return self.standing.incarnation == life and (by_another or self._joins_as is None)

        if (yield from led(is_over)):
            raise error
        log.warning("registering again", extra={"reason": str(error)})
        yield from self._join(life)

    # Messages

    def call(self, make: Make[T]) -> Steps[T]:
        """Repeats `make` while the coordinator is away; registers again when it forgot us."""
        life = 0

        def attempt() -> Steps[T]:
            nonlocal life
            life = self.standing.incarnation  # beside the training another one may have begun
            return self._adopting(make)

        while True:
            try:
                return (yield from repeated(lambda: self._under_newest(attempt), self.jitter))
            except (UnknownWorker, Fenced) as error:
                yield from self._come_back(life, error)

    def try_once(self, make: Make[T]) -> Steps[T]:
        """One try of `make` from a thread beside the training; registers again when we are out.

        So an island that was evicted during a long step is back before the step ends. In a group
        only the leader does this; the other ranks need its new life no sooner than `call` tells.
        """
        life = self.standing.incarnation
        try:
            return (yield from self._adopting(make))
        except UnknownWorker as error:
            if not self.standing.joining.acquire(blocking=False):
                raise
            try:
                if self._joins_as is None:  # it is leaving
                    raise
                if self.standing.incarnation == life:
                    log.warning("registering again", extra={"reason": str(error)})
                    yield from self._register_beside()
            finally:
                self.standing.joining.release()
            return (yield from self._adopting(make))

    def _register_beside(self) -> Steps[None]:
        # A fresh look at the settings is for all ranks of a group, from their training threads.
        if self.group.size > 1:
            return self._register(alone=True)
        return self._under_newest(lambda: self._register(alone=True))

    def _adopting(self, make: Make[T]) -> Steps[T]:
        """Sends `make`'s message; refused for its generation, it is sent again in the present one.

        The coordinator looked at nothing else of a message that it refused so.
        """
        for _ in range(MAX_ADOPTIONS):
            try:
                return (yield from make())
            except StaleGeneration as stale:
                self.standing.told(stale.present)
        return (yield from make())

    # Settings

    def refresh(self) -> Steps[bool]:
        """Asks for the settings again; whether a recorded new version is known now.

        ManifestMismatch when the coordinator now states something that no version may change.
        """
        known = self.standing.info
        found = yield from send(InfoRequest())
        adoption.check(known, found)
        self.standing.heard_of(found)
        moved = found.manifest_sha256 != known.manifest_sha256
        if moved:
            about = {"version": found.manifest_version, "manifest": found.manifest_sha256}
            log.info("a new manifest version is recorded", extra=about)
        return moved

    def version(self, manifest_sha256: str) -> Steps[Info]:
        """The settings of one version, by its hash; ManifestMismatch when it is not of this run."""
        found = yield from send(InfoRequest(manifest=manifest_sha256))
        adoption.check_version(self.standing.info, found, manifest_sha256)
        self.standing.heard_of(found)
        return found

    def look(self) -> Steps[str]:
        """The hash of the manifest in force, without taking it over; from any thread.

        ManifestMismatch as `refresh` raises it.
        """
        found = yield from send(InfoRequest(), alone=True)
        adoption.check(self.standing.info, found)
        return found.manifest_sha256

    def _under_newest(self, make: Make[T]) -> Steps[T]:
        """Sends `make`'s message; first asks for the settings if the coordinator was away.

        Asks for them too when it refuses ours, and sends again if they have changed.
        """
        if self._is_away:
            yield from self.refresh()
            self._is_away = False
        while True:
            known = self.standing.info.manifest_sha256
            try:
                return (yield from make())
            except CoordinatorUnreachable:
                # Not where ranks go in step: a call may be the leader's alone. They learn of a
                # new version by the refusal of the old one.
                self._is_away = self.group.size == 1
                raise
            except ManifestMismatch:
                # Another thread may have heard of it before; a refusal of the newest is final.
                yield from self.refresh()
                if not (yield from self._knows_newer(known)):
                    raise

    def _knows_newer(self, known: str) -> Steps[bool]:
        """Collective: whether the leader knows of another manifest than it did before."""
        return (yield from decided(lambda: self.standing.info.manifest_sha256 != known))

    # The end

    def leave_once(self) -> Steps[None]:
        """Says goodbye with one try."""
        if self.is_registered:
            self._joins_as = None
            yield from self._say_goodbye()
            self.standing.left()

    def leave(self) -> Steps[None]:
        """Says goodbye until it is heard; harmless when repeated."""
        if self.is_registered:
            self._joins_as = None
            # Unknown: an earlier try got through and its answer was lost. Fenced: what there is to
            # leave is another life's.
            with contextlib.suppress(UnknownWorker, Fenced):
                yield from repeated(lambda: self._under_newest(self._say_goodbye), self.jitter)
            self.standing.left()

    def _say_goodbye(self) -> Steps[Done]:
        return self._adopting(lambda: send(LeaveRequest(identity=self.standing.identity())))
