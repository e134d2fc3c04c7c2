"""A rank's own server: takes in what other ranks of the present group send, and nothing else."""

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from atoll.collectives import memory
from atoll.collectives.grpc import dial, messages
from atoll.collectives.grpc.bulk import BulkListener
from atoll.collectives.grpc.door import Door, Present
from atoll.collectives.grpc.outbox import ANSWERS_EVERY
from atoll.collectives.grpc.trust import Identity, RankGroup
from atoll.collectives.mailbox import Mailbox
from atoll.collectives.peers import READ_BYTES, Desk, Source
from atoll.errors import Accident, AddressUnreachable, AtollError, NotReady
from atoll.wire import rpc, statuses

if TYPE_CHECKING:
    Context = grpc.ServicerContext

log = logging.getLogger(__name__)

CLOSING_SECONDS = 0.5
BEGINNING_SECONDS = 0.1  # far above what a handshake's beginning takes, which is some 0.1 ms
MAX_STREAMS = 256  # one for each peer, and room for old ones that are just ending


class RankServer:
    """One per process; outlives groups. Thread-safe.

    Every stream has a thread of gRPC's pool, which waits where a mailbox is full. Bulk sockets come
    to `bulk_port`, or any that is free, once a peer asks for one.
    """

    def __init__(
        self, listen: str, *, identity: Identity | None = None, bulk_port: int = 0
    ) -> None:
        memory.keep_freed()
        self._identity = identity
        self._door = Door()
        self._trusted = b""  # by gRPC at present
        self._asked = 0.0  # when the last handshake asked whom to trust
        self._trusted_lock = threading.Lock()
        self._owing: set[object] = set()  # streams with messages that are not answered yet
        self._answered = threading.Condition()
        self._pool = ThreadPoolExecutor(MAX_STREAMS, thread_name_prefix="rank-server")
        self._server = grpc.server(
            self._pool, options=dial.options(), maximum_concurrent_rpcs=MAX_STREAMS
        )
        self._server.add_generic_rpc_handlers((self._handlers(),))
        host = listen.rpartition(":")[0]
        try:
            port = self._bind(listen)
        except RuntimeError as exc:
            self._pool.shutdown()
            raise AddressUnreachable(
                f"listen={listen!r} cannot be listened on: {exc}; choose a free port"
            ) from exc
        self.address = f"{host}:{port}"
        self._bulk = BulkListener(host, bulk_port, self._door, identity=identity)
        self._server.start()

    def _bind(self, listen: str) -> int:
        if self._identity is None:
            return self._server.add_insecure_port(listen)
        first = self._configuration(b"")
        credentials = grpc.dynamic_ssl_server_credentials(
            first,
            self._fetched,  # type: ignore[arg-type]  # None is documented, not in the stubs
            require_client_authentication=True,
        )
        return self._server.add_secure_port(listen, credentials)

    def _configuration(self, trusted: bytes) -> "grpc.ServerCertificateConfiguration":
        """Without a group only its own certificate is trusted, whose key nobody else has."""
        assert self._identity is not None
        own = self._identity
        return grpc.ssl_server_certificate_configuration(
            [(own.key_pem, own.certificate_pem)], trusted or own.certificate_pem
        )

    def _fetched(self) -> "grpc.ServerCertificateConfiguration | None":
        """Whom to trust from this handshake on; None where that is as it was.

        gRPC asks for one handshake at a time, and then frees what was trusted before, which another
        handshake that asked just before may only be about to use: the process crashes. So a change
        waits until whoever asked last has surely begun; who asks later waits for this one.
        """
        with self._trusted_lock:
            present = self._door.present
            trusted = b"" if present is None else present.group.certificates
            found = None
            if trusted != self._trusted:
                time.sleep(max(0.0, self._asked + BEGINNING_SECONDS - time.monotonic()))
                found, self._trusted = self._configuration(trusted), trusted
            self._asked = time.monotonic()
        return found

    @property
    def bulk_port(self) -> int:
        """Where bulk sockets are opened, which it listens on from now on."""
        return self._bulk.port()

    # Groups

    def enter(
        self,
        group: RankGroup,
        mailbox: Mailbox | None = None,
        *,
        source: Source | None = None,
        desk: Desk | None = None,
    ) -> None:
        """From now on messages of this group go to `mailbox`, and no other's anywhere.

        Its members, and nobody else, read from `source` and ask at `desk`. Without a mailbox the
        group only measures: who sends is told to call again.
        """
        self._door.present = Present(group, mailbox, source, desk)
        self._bulk.dismiss()

    def leave(self) -> None:
        """From now on nobody is let in."""
        self._door.present = None
        self._bulk.dismiss()

    def close(self) -> None:
        """Ends all streams; who waits in a mailbox must be sent away before."""
        self.leave()
        with self._answered:  # their askers wait for the last answers
            self._answered.wait_for(lambda: not self._owing, CLOSING_SECONDS)
        self._server.stop(grace=None).wait()
        self._bulk.close()
        self._pool.shutdown()

    # Methods

    def _handlers(self) -> grpc.GenericRpcHandler:
        made: dict[str, Any] = {
            "Deliver": grpc.stream_stream_rpc_method_handler(self._deliver),
            "Bulk": grpc.unary_unary_rpc_method_handler(self._invite),
            "Ping": grpc.unary_unary_rpc_method_handler(self._ping),
            "Read": grpc.unary_stream_rpc_method_handler(self._read),
            "Ask": grpc.unary_unary_rpc_method_handler(self._ask),
        }
        return grpc.method_handlers_generic_handler(dial.SERVICE, made)

    def _deliver(self, parts: Iterator[bytes], context: "Context") -> Iterator[bytes]:
        """Takes messages in order and says how many lie in the mailbox."""
        owed = 0  # answers
        stream = object()
        try:
            present, sender = self._admitted(context)
            mailbox = present.box()
            for part in parts:
                if is_message := part != messages.ASK:
                    label, values = messages.unpacked(part)
                    self._door.check(present)
                    with mailbox.landing(label, sender, len(values), _soon) as place:
                        if place is not None:
                            place.put(values)
                            mailbox.landed(label, sender, place)
                    if place is None:
                        mailbox.deliver(label, sender, values)
                    owed += 1
                    self._owing.add(stream)
                if owed and (owed == ANSWERS_EVERY or not is_message):
                    yield messages.count(owed)
                    owed = 0
                    self._paid(stream)
            yield messages.count(owed)
        except AtollError as error:
            if owed:
                yield messages.count(owed)
            _abort(context, error)
        finally:
            self._paid(stream)

    def _paid(self, stream: object) -> None:
        """A stream's answers are on their way; gRPC asks for more when it has sent the last."""
        with self._answered:
            self._owing.discard(stream)
            self._answered.notify_all()

    def _invite(self, _: bytes, context: "Context") -> bytes:
        """Where and with what key the caller may open a socket for the same messages."""
        try:
            return messages.invite(*self._bulk.invited(*self._admitted(context)))
        except AtollError as error:
            _abort(context, error)

    def _ping(self, request: bytes, context: "Context") -> bytes:
        """Gives back what came, to measure how long that takes."""
        try:
            self._admitted(context)
        except AtollError as error:
            _abort(context, error)
        return request[:64]

    def _read(self, request: bytes, context: "Context") -> Iterator[bytes]:
        """What the present group may read of this rank, in pieces that a peer takes."""
        try:
            present, _ = self._admitted(context)
            if present.source is None:
                raise NotReady("this rank has nothing to read yet; call again")
            for piece in present.source.read(*messages.range_asked(request)):
                for start in range(0, len(piece), READ_BYTES):
                    self._door.check(present)
                    yield bytes(piece[start : start + READ_BYTES])
        except AtollError as error:
            _abort(context, error)
        except Exception:
            log.exception("a read met an unexpected error")
            _abort(context, Accident())

    def _ask(self, request: bytes, context: "Context") -> bytes:
        """What this rank's desk answers to a member of the present group."""
        try:
            present, sender = self._admitted(context)
            if present.desk is None:
                raise NotReady("this rank answers nothing yet; call again")
            name, body = messages.asked(request)
            return bytes(present.desk.answer(sender, name, body))
        except AtollError as error:
            _abort(context, error)
        except Exception:
            log.exception("a question met an unexpected error")
            _abort(context, Accident())

    def _admitted(self, context: "Context") -> tuple[Present, int]:
        shown = {str(k): str(v) for k, v in context.invocation_metadata() or ()}
        certificate: bytes | None = None
        if self._identity is not None:
            shown_pem: Any = context.auth_context().get("x509_pem_cert") or [b""]
            certificate = shown_pem[0]
        return self._door.admitted(shown, certificate, peer=context.peer())


def _soon() -> None:
    """How a message is cut off that came whole: it is received in no time."""


def _abort(context: "Context", error: AtollError) -> NoReturn:
    """Ends a call as `wire.rpc` reads it on the other side."""
    context.set_trailing_metadata(rpc.trailers(error))
    context.abort(statuses.rpc(error), statuses.sentence(error))
