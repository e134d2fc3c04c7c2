"""The sending half of bulk sockets: a gRPC call asks for a key, a socket shows it and carries."""

import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from torch import Tensor

from atoll.collectives import memory
from atoll.collectives.base import Label
from atoll.collectives.grpc import dial, messages, sockets
from atoll.collectives.grpc.outbox import Ask, Message, Outbox, Stream
from atoll.collectives.grpc.trust import Identity, RankGroup
from atoll.errors import CoordinatorUnreachable, Forbidden, ProtocolError

DIAL_SECONDS = 10.0
ANSWERS_AT_ONCE = 4_096


class TcpCarrier:
    """Fulfils `port.Carrier`: messages go from tensor memory into a socket, uncopied.

    One thread writes and reads answers, since a TLS connection bears no two.
    """

    def __init__(self, group: RankGroup, rank: int, *, identity: Identity | None) -> None:
        self._group = group
        self._rank = rank
        self._identity = identity

    def carry(self, to: int, outbox: Outbox) -> None:
        # The bell outlives the stream: whoever puts a message in rings it until then.
        with _Bell() as bell, outbox.stream() as stream:
            port, key = self._invited(to, stream)
            try:
                with self._connected(to, port, stream) as connection:
                    _show(connection, key)
                    _Socket(connection, stream, bell).work()
            except OSError as error:
                raise CoordinatorUnreachable(f"the socket to rank {to} broke: {error}") from error

    def _invited(self, to: int, stream: Stream) -> tuple[int, bytes]:
        with dial.typed(), dial.channel(self._group, to, self._identity) as channel:
            ask: Any = channel.unary_unary(f"/{dial.SERVICE}/Bulk")
            shown = self._group.metadata(self._rank)
            call = ask.future(b"", metadata=shown, timeout=DIAL_SECONDS)
            stream.cut_by(call.cancel)
            try:
                return messages.invitation(call.result())
            except grpc.FutureCancelledError as over:
                raise CoordinatorUnreachable("this rank has left its group") from over

    @contextmanager
    def _connected(self, to: int, port: int, stream: Stream) -> Iterator[socket.socket]:
        """A socket to the peer itself."""
        member = self._group.members[to]
        host = member.address.rpartition(":")[0].strip("[]")
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as plain:
            stream.cut_by(lambda: sockets.cut(plain))
            plain.settimeout(DIAL_SECONDS)
            plain.connect((host, port))
            sockets.prepared(plain)
            if self._identity is None:
                yield plain
                return
            trusted = member.certificate_pem
            with sockets.secured(plain, self._identity, trusted, is_server=False) as connection:
                stream.cut_by(lambda: sockets.cut(connection))
                connection.do_handshake()
                if not sockets.shows(connection, trusted):
                    raise Forbidden(f"the certificate at {member.address!r} is not rank {to}'s")
                yield connection


def _show(connection: socket.socket, key: bytes) -> None:
    """Shows the key and waits until it has opened the way."""
    connection.sendall(key)
    answer = connection.recv(1)
    if answer == sockets.REFUSED:
        raise sockets.refused(connection, b"")
    if answer != sockets.TAKEN:
        raise CoordinatorUnreachable("a peer ended the socket that it had asked for")
    connection.settimeout(None)


class _Bell:
    """Wakes a thread that sleeps in `poll`."""

    def __init__(self) -> None:
        self._heard, self._ringing = socket.socketpair()

    def __enter__(self) -> "_Bell":
        return self

    def __exit__(self, *_: object) -> None:
        self._heard.close()
        self._ringing.close()

    def fileno(self) -> int:
        return self._heard.fileno()

    def ring(self) -> None:
        self._ringing.send(b"\0")

    def hear(self) -> None:
        self._heard.recv(16)


class _Socket:
    """One connection's life: writes what there is, reads answers in between, sleeps for either."""

    def __init__(self, connection: socket.socket, stream: Stream, bell: _Bell) -> None:
        self._connection = connection
        self._stream = stream
        self._bell = bell
        self._answers = select.poll()
        self._answers.register(connection, select.POLLIN)
        self._both = select.poll()
        self._both.register(connection, select.POLLIN)
        self._both.register(bell.fileno(), select.POLLIN)

    def work(self) -> None:
        """Until the stream is over; raises when the connection breaks or the peer refuses."""
        while not self._stream.is_over:
            message = self._stream.next_now(self._bell.ring)
            if message is not None:
                self._write(message)
                continue
            ready = {found for found, _ in self._both.poll()}
            if self._bell.fileno() in ready:
                self._bell.hear()
            if self._connection.fileno() in ready:
                self._read()

    def _write(self, message: Message | Ask) -> None:
        try:
            if isinstance(message, Ask):
                self._connection.sendall(messages.ASK_HEADER)
            else:
                self._send(*message)
        except OSError:
            self._read()  # the peer may have said why it takes no more
            raise
        if self._answers.poll(0):
            self._read()

    def _send(self, label: Label, values: Tensor) -> None:
        with self._stream.reading() as is_there:
            if is_there:
                data = memory.bytes_of(values)
                sockets.send(self._connection, messages.header(label, len(data)), data)

    def _read(self) -> None:
        said = self._connection.recv(ANSWERS_AT_ONCE)
        taken = len(said) - len(said.lstrip(sockets.TAKEN))
        self._stream.answered(taken)
        if not said:
            raise CoordinatorUnreachable("a peer ended the socket")
        if taken < len(said):
            if said[taken : taken + 1] != sockets.REFUSED:
                raise ProtocolError(f"a peer answers {said[taken]}, which no rank writes")
            raise sockets.refused(self._connection, said[taken + 1 :])
