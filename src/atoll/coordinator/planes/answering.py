"""One request after the other: who asks, what is said, and how the answer goes out."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import Request, Response
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from atoll.clock import Clock
from atoll.coordinator import handlers
from atoll.coordinator.authority import Authority
from atoll.coordinator.handlers import Arrival
from atoll.coordinator.planes.access import Access, Role
from atoll.coordinator.planes.answer_places import AnswerPlaces, sent_in_pieces
from atoll.coordinator.planes.bodies import Bodies
from atoll.errors import AtollError
from atoll.protocol.exchange import Ask, Waiting
from atoll.protocol.messages import Identity


class LongPolls:
    """Wakes waiting requests when the coordinator's state moved.

    `notify` may be called from any thread; everything else belongs to the event loop.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None  # once somebody waits
        self._event = asyncio.Event()
        self.closed = False

    def notify(self) -> None:
        """Called by the coordinator from whatever thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._fire)

    def _fire(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    def close(self) -> None:
        """The server stops: nobody waits any more."""
        self.closed = True
        self._event.set()

    def next(self) -> asyncio.Event:
        """Set at the first change from now on; taken before looking, no change can be missed."""
        self._loop = asyncio.get_running_loop()
        return self._event


@dataclass(frozen=True)
class Answering:
    """Reads messages and sends what the coordinator says to them; belongs to the event loop."""

    coordinator: Authority
    access: Access
    clock: Clock
    long_polls: LongPolls
    places: AnswerPlaces
    bodies: Bodies = field(default_factory=Bodies)

    def admins_only(self, http: Request) -> None:
        """Refuses a token of another role."""
        with self.coordinator.refusals():
            self.access.require(http.headers.get("authorization"), Role.ADMIN)

    async def answer(self, http: Request, kind: type[Ask[Any]]) -> Response:
        """The answer to a request that should be of `kind`; a refusal is a typed error."""
        if kind.route.sender == "admin":
            # A token of either role is enough otherwise, and the guard has seen one.
            self.admins_only(http)
        with self.coordinator.refusals():
            message = await self.bodies.message(http, kind)
            message.check_path(http.path_params)
        peer = "" if http.client is None else http.client.host
        if not kind.route.large:
            return Response(await self._said(message, peer), media_type="application/json")

        async def make() -> str:
            return await self._said(message, peer)

        return await self.large(http, make, "application/json", message)

    async def large(
        self,
        http: Request,
        make: Callable[[], Awaitable[str | bytes]],
        media_type: str,
        message: Ask[Any] | None = None,
    ) -> Response:
        """What `make` makes, once there is a place for one more large answer to this sender."""
        asker = self._asker(http, getattr(message, "identity", None))
        with self.coordinator.refusals():
            held = await self.places.hold(asker)
        async with held:
            return sent_in_pieces(await make(), media_type=media_type, held=held.pop_all())

    def _asker(self, http: Request, identity: Identity | None) -> str | None:
        """Whose place an answer takes: a worker's if it shows its key, else an address's."""
        if self.access.is_admin(http.headers.get("authorization")):
            return None
        with suppress(AtollError):
            if identity is not None:
                self.coordinator.registry.check(identity)
                return f"worker {identity.worker_id}"
        return f"address {'' if http.client is None else http.client.host}"

    async def _said(self, message: Ask[Any], peer: str) -> str:
        kind, arrival = type(message), Arrival(peer=peer)
        wait_seconds = message.wait_seconds if isinstance(message, Waiting) else 0.0
        deadline = self.clock.now() + wait_seconds
        while True:
            changed = self.long_polls.next()
            reply: BaseModel
            if kind.route.in_loop:
                reply = handlers.answer(self.coordinator, message, arrival)
            else:
                reply = await run_in_threadpool(handlers.answer, self.coordinator, message, arrival)
            left = deadline - self.clock.now()
            if message.is_answered(reply) or left <= 0 or self.long_polls.closed:
                # Our own answers are not checked again: that would cost more than most of them
                # take to make.
                written = reply.model_dump_json
                return await run_in_threadpool(written) if kind.route.large else written()
            arrival = replace(arrival, again=True)
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), left)
