"""A cable between ranks: bytes pass through unchanged, until it is cut or held.

It stands where a rank dials. What it cuts it cuts in the middle of whatever is on the way; whoever
dials again gets a new connection.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

HOST = "127.0.0.1"
PIECE = 1 << 14


class Cable:
    """Everything that is dialled at `address` goes to `target` and back.

    `cut_after` bytes towards the target, counted over all connections, the connection is cut, once.
    """

    def __init__(
        self, target: str, *, listen: str = f"{HOST}:0", cut_after: int | None = None
    ) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._cut_after = cut_after
        self.carried = 0  # bytes towards the target
        self.connections = 0
        self.cuts = 0
        self._lock = threading.Lock()
        self._ends: list[socket.socket] = []
        self._used: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        host, _, port = listen.rpartition(":")
        self._listener = socket.create_server((host, int(port)))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def cut(self) -> None:
        """Ends all connections that there are."""
        with self._lock:
            ends, self._ends = self._ends, []
            self._used += ends
            self.cuts += 1
        for end in ends:
            _broken(end)

    def close(self) -> None:
        _broken(self._listener)
        self._listener.close()
        self._threads[0].join()  # accepts: a connection that it was just making is cut below
        self.cut()
        for thread in self._threads:
            thread.join()
        for end in self._used:
            end.close()

    def _start(self, work, *args: object) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                continue
            with self._lock:
                self._ends += [near, far]
                self.connections += 1
            self._start(self._carry, near, far, True)
            self._start(self._carry, far, near, False)

    def _carry(self, source: socket.socket, to: socket.socket, is_onward: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(PIECE):
                if is_onward and self._is_cut_by(len(data)):
                    self.cut()
                    break
                to.sendall(data)
        for end in (source, to):
            _broken(end)

    def _is_cut_by(self, nbytes: int) -> bool:
        with self._lock:
            self.carried += nbytes
            if self._cut_after is None or self.carried < self._cut_after:
                return False
            self._cut_after = None
            return True


def _broken(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def cable(target: str, **options: Any) -> Iterator[Cable]:
    """A cable to `target` until the block ends."""
    made = Cable(target, **options)
    try:
        yield made
    finally:
        made.close()
