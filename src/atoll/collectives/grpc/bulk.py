"""The receiving half of bulk sockets: who shows a key that a gRPC call handed out is let in, once.

A thread for each connection reads into fresh memory and delivers to the mailbox; where that is full
it waits, and with it that sender's socket, nobody else's.
"""

import contextlib
import functools
import hmac
import logging
import secrets
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

from atoll.collectives import memory, places
from atoll.collectives.grpc import messages, sockets
from atoll.collectives.grpc.door import Door, Present
from atoll.collectives.grpc.outbox import ANSWERS_EVERY
from atoll.collectives.grpc.trust import Identity
from atoll.errors import AddressUnreachable, AtollError, Forbidden

log = logging.getLogger(__name__)

OPENING_SECONDS = 10.0  # for TLS and the key together
CLOSING_SECONDS = 0.5
ACCEPT_PAUSE_SECONDS = 0.1
KEPT_BUFFERS = 4  # of each connection: what a mailbox holds, one that is read, one that comes
MAX_OPENING = 64  # connections that have shown no key yet


class BulkListener:
    """The bulk sockets of one rank's server; it listens from the first key on."""

    def __init__(self, host: str, port: int, door: Door, *, identity: Identity | None) -> None:
        self._at = (host.strip("[]"), port)
        self._door = door
        self._identity = identity
        self._lock = threading.Lock()
        self._keys: dict[int, tuple[bytes, Present]] = {}  # of each rank the newest, unused
        self._open: dict[socket.socket, Present | None] = {}
        self._opening: dict[socket.socket, str] = {}  # from where; no key yet; oldest first
        self._threads: set[threading.Thread] = set()
        self._listener: socket.socket | None = None
        self._over = threading.Event()

    def invited(self, present: Present, sender: int) -> tuple[int, bytes]:
        """The port, and a key that opens one connection for that rank."""
        present.box()
        key = secrets.token_bytes(sockets.KEY_BYTES)
        with self._lock:
            self._keys[sender] = (key, present)
        return self.port(), key

    def port(self) -> int:
        """Where it listens, from now on at the latest."""
        with self._lock:
            return self._listening()

    def dismiss(self) -> None:
        """The group has changed: what is sent for another one is refused, who sends nothing is
        cut off, and no old key opens anything.
        """
        with self._lock:
            self._keys.clear()
            over = [c for c, present in self._open.items() if present is not self._door.present]
        for connection in over:
            sockets.cut(connection, socket.SHUT_RD)

    def close(self) -> None:
        with self._lock:
            self._over.set()
            self._keys.clear()
            ends = [*self._open, *([self._listener] if self._listener else [])]
            threads = list(self._threads)
        for end in ends:
            sockets.cut(end, socket.SHUT_RD)
        until = time.monotonic() + CLOSING_SECONDS
        for thread in threads:  # their last answers
            thread.join(max(0.0, until - time.monotonic()))
        for end in ends:
            sockets.cut(end)
        for thread in threads:
            thread.join()
        if self._listener is not None:
            self._listener.close()

    def _listening(self) -> int:
        if self._listener is None:
            family = socket.AF_INET6 if ":" in self._at[0] else socket.AF_INET
            try:
                self._listener = socket.create_server(self._at, family=family)
            except OSError as exc:
                raise AddressUnreachable(
                    f"bulk_port={self._at[1]} of {self._at[0]!r} cannot be listened on: {exc}; "
                    f"choose a free port"
                ) from exc
            self._start(self._accept, self._listener)
        return int(self._listener.getsockname()[1])

    def _start(self, work: Callable[[socket.socket], None], connection: socket.socket) -> None:
        def worked() -> None:
            try:
                work(connection)
            finally:
                with self._lock:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=worked, name="bulk", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while not self._over.is_set():
            try:
                connection, address = listener.accept()
            except OSError:  # the end, a caller that went, or too many open files
                self._over.wait(ACCEPT_PAUSE_SECONDS)
                continue
            with self._lock:
                if self._over.is_set():
                    connection.close()
                    continue
                self._open[connection] = None
                self._opening[connection] = str(address[0])
                self._start(self._serve, connection)
                crowded_out = self._crowded_out()
            if crowded_out is not None:
                sockets.cut(crowded_out)

    def _crowded_out(self) -> socket.socket | None:
        """Who gives up its place when there are too many; under the lock.

        The oldest of the address with the most: a member shows its key at once, and strangers who
        sit there, however many, keep nobody out who comes from elsewhere.
        """
        if len(self._opening) <= MAX_OPENING:
            return None
        [(most, _)] = Counter(self._opening.values()).most_common(1)
        found = next(one for one, address in self._opening.items() if address == most)
        del self._opening[found]
        return found

    # One connection

    def _serve(self, plain: socket.socket) -> None:
        connection = plain
        try:
            connection = self._secured(plain)
            with _open_by(OPENING_SECONDS, connection):
                if isinstance(connection, ssl.SSLSocket):
                    connection.do_handshake()
                present, sender = self._let_in(connection)
            with self._lock:
                self._open[connection] = present
                self._opening.pop(connection, None)
            self._received(connection, present, sender)
        except AtollError as error:
            with contextlib.suppress(OSError), _open_by(sockets.DRAIN_SECONDS, connection):
                connection.sendall(sockets.refusal(error))
                sockets.drain(connection)
        except OSError as error:
            log.info("a bulk socket broke", extra={"reason": str(error)})
        finally:
            with self._lock:
                self._open.pop(connection, None)
                self._opening.pop(connection, None)
            connection.close()

    def _secured(self, plain: socket.socket) -> socket.socket:
        """What is read from and written to; it takes the place of the plain one."""
        sockets.prepared(plain)
        if self._identity is None:
            return plain
        present = self._door.present
        trusted = self._identity.certificate_pem if present is None else present.group.certificates
        with self._lock:
            del self._open[plain]
            connection = sockets.secured(plain, self._identity, trusted, is_server=True)
            self._open[connection] = None
            address = self._opening.pop(plain, None)
            if address is None:  # it has just been crowded out
                sockets.cut(connection)
            else:
                self._opening[connection] = address
        return connection

    def _let_in(self, connection: socket.socket) -> tuple[Present, int]:
        shown = bytearray(sockets.KEY_BYTES)
        if not sockets.fill(connection, memoryview(shown)):
            raise Forbidden("the caller shows no key")
        with self._lock:
            found = [k for k, (key, _) in self._keys.items() if hmac.compare_digest(key, shown)]
            if not found:
                log.warning("a bulk socket was refused", extra={"reason": "no key"})
                raise Forbidden("the caller's key opens nothing here, or no more; ask for another")
            _, present = self._keys.pop(found[0])
        self._door.check(present)
        member = present.group.members[found[0]]
        if self._identity is not None and not sockets.shows(connection, member.certificate_pem):
            raise Forbidden(f"the caller's certificate is not that of rank {found[0]}")
        connection.sendall(sockets.TAKEN)
        return present, found[0]

    def _received(self, connection: socket.socket, present: Present, sender: int) -> None:
        """Until the connection ends; raises what ends the sender's stream."""
        mailbox, header = present.box(), memoryview(bytearray(messages.HEADER_BYTES))
        owed = 0  # answers
        cut = functools.partial(sockets.cut, connection)
        read = functools.partial(sockets.fill, connection)
        buffers = memory.Buffers(messages.MAX_VALUES_BYTES, kept=KEPT_BUFFERS)
        room = memoryview(bytearray(places.ROOM_BYTES))
        try:
            while sockets.fill(connection, header):
                if is_message := header != messages.ASK_HEADER:
                    label, nbytes = messages.announced(header)
                    with mailbox.landing(label, sender, nbytes, cut) as place:
                        if place is not None:
                            if not place.receive(read, room):
                                break
                            self._door.check(present)
                            mailbox.landed(label, sender, place)
                    if place is None:
                        values = buffers.take(nbytes)
                        if not read(values):
                            break
                        self._door.check(present)
                        mailbox.deliver(label, sender, values)
                    owed += 1
                if owed and (owed == ANSWERS_EVERY or not is_message):
                    connection.sendall(sockets.TAKEN * owed)
                    owed = 0
        finally:
            # Whatever ends it: what lies in the mailbox need not be sent again.
            with contextlib.suppress(OSError):
                connection.sendall(sockets.TAKEN * owed)


@contextlib.contextmanager
def _open_by(seconds: float, connection: socket.socket) -> Iterator[None]:
    """Cuts a caller off that has not shown its key, or gone, in time."""
    deadline = threading.Timer(seconds, sockets.cut, [connection])
    deadline.daemon = True
    deadline.start()
    try:
        yield
    finally:
        deadline.cancel()
