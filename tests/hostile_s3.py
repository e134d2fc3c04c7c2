"""An HTTP server that answers as it is told, byte for byte, and keeps what it was asked.

Stands where an S3 server would. An answer is what a test writes to the raw connection, so a length
may lie, a body may trickle, and the end of the connection is seen.
"""

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

LIMIT_SECONDS = 20.0


@dataclass
class Asked:
    """One request, and the connection on which it is answered."""

    method: str
    path: str
    headers: dict[str, str]
    connection: socket.socket

    def answer(self, status: str, *headers: str, body: bytes = b"") -> None:
        """A whole answer; its length is told only by the `headers`."""
        head = "\r\n".join([f"HTTP/1.1 {status}", *headers, "", ""])
        self.connection.sendall(head.encode() + body)

    def wait_for_end(self) -> bool:
        """Whether the client closed the connection within the limit."""
        self.connection.settimeout(LIMIT_SECONDS)
        with contextlib.suppress(ConnectionError):
            return self.connection.recv(1) == b""
        return True

    def is_closed(self) -> bool:
        """Whether the client has closed the connection by now."""
        if not select.select([self.connection], [], [], 0.02)[0]:
            return False
        return self.wait_for_end()


Answer = Callable[[Asked], None]


@dataclass
class HostileServer:
    """Listens on loopback; `answer` is called for every request, on a thread of its connection."""

    answer: Answer
    asked: list[Asked] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        with contextlib.suppress(OSError):  # closed before
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(LIMIT_SECONDS)
            assert not thread.is_alive(), "a connection of the hostile server never ended"

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                thread = threading.Thread(target=self._serve, args=(connection,))
                self._threads.append(thread)
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(LIMIT_SECONDS)
        with connection, contextlib.suppress(ConnectionError):
            asked = _asked(connection)
            if asked is not None:
                self.asked.append(asked)
                self.answer(asked)


def _asked(connection: socket.socket) -> Asked | None:
    """The request on a new connection, its body read; None when the client only connected."""
    with connection.makefile("rb") as lines:
        first = lines.readline().decode().split()
        if not first:
            return None
        headers = {}
        while line := lines.readline().decode().strip():
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        lines.read(int(headers.get("content-length", 0)))
    return Asked(first[0], first[1], headers, connection)


@contextlib.contextmanager
def serving(answer: Answer) -> Iterator[HostileServer]:
    """A server that answers so, until the block ends."""
    server = HostileServer(answer)
    try:
        yield server
    finally:
        server.close()
