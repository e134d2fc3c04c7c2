"""Both planes of one coordinator in one event loop, from bind to a clean end."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
import uvicorn

from atoll.clock import Clock
from atoll.coordinator.authority import Authority
from atoll.coordinator.planes import (
    access,
    answer_places,
    app,
    head_timeout,
    transfer,
    write_timeout,
)
from atoll.coordinator.planes.access import Access
from atoll.coordinator.planes.answer_places import AnswerPlaces
from atoll.coordinator.planes.closing_thread import ClosingThread
from atoll.coordinator.planes.head_timeout import TimedHeads
from atoll.coordinator.planes.write_timeout import TimedWrites
from atoll.errors import ConfigError
from atoll.wire import rpc
from atoll.wire.certificate import Certificate

log = logging.getLogger(__name__)

TRANSFER_THREADS = 4
STOP_SECONDS = 5.0  # SIGTERM must be over within 10 s, with all that ends beside it
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, kw_only=True)
class Listen:
    """Where to serve; port 0 takes a free one."""

    host: str = "127.0.0.1"
    port: int = 8760
    transfer_port: int = 0
    certificate: Certificate | None = None
    stay: bool = False  # keep serving after the run is finished
    head_seconds: float = head_timeout.HEAD_SECONDS  # a request's head is whole by then
    write_seconds: float = write_timeout.WRITE_SECONDS  # within which an answer's reader reads on
    wait_seconds: float = answer_places.WAIT_SECONDS  # for a place to be sent a large answer


@dataclass(frozen=True)
class Address:
    """Where the coordinator is reached."""

    host: str
    port: int
    transfer_port: int


class _Http(uvicorn.Server):
    """uvicorn without its own signal handlers: one place decides when both planes end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    """Serves a coordinator until it is told to stop, the run is over, or closing a round failed.

    Belongs to the thread of the event loop, except `stop`; starts and ends the closing thread.
    """

    def __init__(
        self, coordinator: Authority, access: Access, clock: Clock, *, listen: Listen
    ) -> None:
        self._coordinator = coordinator
        self._access = access
        self._listen = listen
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._is_told = False
        places = AnswerPlaces(wait_seconds=listen.wait_seconds)
        self.app = app.create(coordinator, access, clock, places=places)

    def run(
        self,
        on_ready: Callable[[Address], None],
        *,
        signals: Sequence[signal.Signals] = STOP_SIGNALS,
    ) -> None:
        """Blocks until the end; raises what made closing a round fail.

        `signals` end it; give none outside the main thread, where none can be caught. They stay
        caught afterwards: a second one must not cut short what closes the ledger.
        """
        for number in signals:
            signal.signal(number, lambda *_: self.stop())
        asyncio.run(self._serve(on_ready))
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Ends a running server as a signal would; from any thread, harmless after the end."""
        self._is_told = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)

    def _fail(self, exc: BaseException) -> None:
        self._failure = exc
        self.stop()

    async def _serve(self, on_ready: Callable[[Address], None]) -> None:
        self._loop = asyncio.get_running_loop()
        if self._is_told:
            self._stop.set()
        listener = bind(self._listen.host, self._listen.port)
        pool = ThreadPoolExecutor(TRANSFER_THREADS, thread_name_prefix="transfer")
        try:
            data_plane, transfer_port = await self._start_rpc(pool)
        except BaseException:
            listener.close()
            raise
        self._coordinator.transfer_port = transfer_port
        http = _Http(self._http_config())
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        tick = min(0.25, self._coordinator.manifest.heartbeat_interval / 4)
        closing = ClosingThread(self._coordinator, tick_seconds=tick, on_failure=self._fail)
        closing.start()
        self._coordinator.ledger.on_lost(self._fail)
        on_ready(Address(self._listen.host, listener.getsockname()[1], transfer_port))
        over = asyncio.create_task(self._over())
        ends = [asyncio.create_task(self._stop.wait()), over, serving]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        log.info("coordinator stops")
        is_over = over.done()
        over.cancel()
        # Beside the transports' end, not after it: the seconds would add up.
        closed = asyncio.create_task(asyncio.to_thread(closing.stop, timeout_seconds=STOP_SECONDS))
        self.app.state.long_polls.close()  # long polls end now; islands ask again after a restart
        self._coordinator.presence.stop()  # what ends now is no sign of a death
        http.should_exit = True
        await data_plane.stop(grace=1.0)
        await serving
        if not await closed:
            log.warning("a round was being computed; it is frozen and replays at the next start")
        elif self._coordinator.is_stopping() and self._failure is None:
            # A signal in the middle of a stop leaves it to the next start.
            end = self._coordinator.end_stop if is_over else self._coordinator.save
            await asyncio.to_thread(end)
        pool.shutdown(wait=False, cancel_futures=True)

    def _http_config(self) -> uvicorn.Config:
        certificate = self._listen.certificate
        return uvicorn.Config(
            self.app,
            http=connections(self._listen),
            ws="none",
            proxy_headers=False,
            log_config=None,
            log_level=logging.ERROR,  # a port scan is not worth a line each
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=1,
            ssl_certfile=None if certificate is None else certificate.certificate_path,
            ssl_keyfile=None if certificate is None else certificate.key_path,
        )

    async def _start_rpc(self, pool: ThreadPoolExecutor) -> tuple[grpc.aio.Server, int]:
        data_plane = grpc.aio.server(
            interceptors=[rpc.TokenInterceptor(self._admit)], options=transfer.options()
        )
        service = transfer.TransferService(self._coordinator, pool)
        data_plane.add_generic_rpc_handlers((rpc.handlers(transfer.SERVICE, service),))
        host = f"[{self._listen.host}]" if ":" in self._listen.host else self._listen.host
        where = f"{host}:{self._listen.transfer_port}"
        certificate = self._listen.certificate
        try:
            if certificate is None:
                port = data_plane.add_insecure_port(where)
            else:
                pair = [(certificate.key_pem, certificate.pem)]
                port = data_plane.add_secure_port(where, grpc.ssl_server_credentials(pair))
        except RuntimeError as exc:
            raise ConfigError(
                f"cannot listen on {where} for transfers; choose another --transfer-port"
            ) from exc
        await data_plane.start()
        return data_plane, port

    def _admit(self, authorizations: Sequence[str]) -> None:
        with self._coordinator.refusals():
            self._access.require(access.only(authorizations))

    async def _over(self) -> None:
        """Returns when a finished run has been fetched by everybody who is still there."""
        # A silent island is not waited for: it is no member once the heartbeat timeout is over.
        # An operator may take a stop back while others still train.
        run = self._coordinator
        while (
            not ((run.is_finished() and not self._listen.stay) or run.is_stopping())
            or run.members()
            or run.is_due()
        ):
            await asyncio.sleep(0.1)


def connections(listen: Listen) -> type[TimedHeads]:
    """HTTP connections with the limits of `listen`; uvicorn takes a class."""
    limits = {"head_seconds": listen.head_seconds, "write_seconds": listen.write_seconds}
    return type("Connection", (TimedHeads, TimedWrites), limits)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; ConfigError names an address that cannot be had."""
    try:
        listener = socket.create_server(
            (host, port),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            backlog=1024,
        )
    except OSError as exc:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {exc.strerror}; choose another --host or --port"
        ) from exc
    # Accepted sockets inherit it. asyncio sets it only where the protocol number is given, and
    # without it an answer's body waits 40 ms for the acknowledgement of its head.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
