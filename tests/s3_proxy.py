"""A proxy in front of an S3 server: counts the bytes of every object, and limits, cuts or lies.

One port for each client, so that every rank has a limit of its own. What leaves the proxy is
counted. Whether a client took it all shows afterwards: it asks for something else on the same
connection, or keeps that open for a while. One that closes it at once gave up, and its piece broke.
"""

import contextlib
import http.client
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

GRAIN_BYTES = 16 << 10
_GRAINS_A_SECOND = 8  # at least so many, so that a slow object trickles
_HOP = ("connection", "keep-alive", "transfer-encoding", "content-length", "date", "server")
LIMIT_SECONDS = 120.0
KEPT_SECONDS = 0.5  # a connection that is open for so long after an answer was not given up
BURST_BYTES = 128 << 10


class TokenBucket:
    """So many bytes a second and a small burst, shared by all that take from it."""

    def __init__(self, bytes_per_second: float) -> None:
        self.rate = bytes_per_second
        self._lock = threading.Lock()
        self._due = 0.0

    def take(self, nbytes: int) -> None:
        """Returns once `nbytes` may pass."""
        with self._lock:
            now = time.monotonic()
            burst = min(BURST_BYTES, self.rate / _GRAINS_A_SECOND) / self.rate
            self._due = max(self._due, now - burst) + nbytes / self.rate
            wait = self._due - now
        time.sleep(max(0.0, wait))

    @property
    def grain_bytes(self) -> int:
        return max(1, min(GRAIN_BYTES, int(self.rate / _GRAINS_A_SECOND)))


@dataclass
class Sent:
    """One answer to a GET: which bytes were asked for, how many left, and when."""

    client: int  # whose port it was
    key: str
    start: int
    asked: int  # bytes
    nbytes: int  # of these, sent
    ended: float
    is_whole: bool = False  # the client took it all


@dataclass
class Asked:
    """A request as a test may answer it: on the connection itself, with whatever bytes."""

    method: str
    key: str
    headers: Mapping[str, str]
    write: Callable[[bytes], object]

    def answer(self, status: str, *headers: str, body: bytes = b"") -> None:
        """A whole answer; its length is told only by the `headers`."""
        head = "\r\n".join([f"HTTP/1.1 {status}", *headers, "", ""])
        self.write(head.encode() + body)


# Answers a request itself and closes the connection, or says False and lets it pass.
Intercept = Callable[[Asked], bool]


@dataclass
class S3Proxy:
    """All ports of one proxy, what passed them, and how it behaves. Close it."""

    upstream: str
    limits: Mapping[int, TokenBucket] = field(default_factory=dict)  # by client
    slow: Mapping[str, TokenBucket] = field(default_factory=dict)  # by what is in a key
    intercept: Intercept = lambda _: False
    sent: list[Sent] = field(default_factory=list)
    is_away: bool = False

    def __post_init__(self) -> None:
        self._servers: list[ThreadingHTTPServer] = []
        self._lock = threading.Lock()

    def port(self, client: int) -> str:
        """The address for one more client."""
        server = _server(self, client)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        self._servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    def note(self, one: Sent) -> None:
        with self._lock:
            self.sent.append(one)

    def between(self, start: float, stop: float) -> list[Sent]:
        """What ended in that time."""
        return [one for one in list(self.sent) if start <= one.ended < stop]

    def limits_of(self, client: int, key: str) -> list[TokenBucket]:
        found = [limit for part, limit in self.slow.items() if part in key]
        return [*found, self.limits[client]] if client in self.limits else found

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()


@contextlib.contextmanager
def proxied(upstream: str) -> Iterator[S3Proxy]:
    """A proxy until the block ends."""
    proxy = S3Proxy(upstream)
    try:
        yield proxy
    finally:
        proxy.close()


def objects(sent: Iterable[Sent]) -> dict[str, list[Sent]]:
    """What was sent of each frame."""
    found: dict[str, list[Sent]] = {}
    for one in sent:
        if "/frames/" in one.key:
            found.setdefault(one.key, []).append(one)
    return found


def sent_bytes(sent: Iterable[Sent]) -> int:
    """Of all frames."""
    return sum(one.nbytes for some in objects(sent).values() for one in some)


def bytes_twice(sent: Iterable[Sent]) -> int:
    """Bytes of frames that came again though the piece that they first came in had not broken."""
    twice = 0
    for some in objects(sent).values():
        end = 0
        for one in sorted((one for one in some if one.is_whole), key=lambda one: one.start):
            stop = one.start + one.nbytes
            twice += max(0, min(end, stop) - one.start)
            end = max(end, stop)
    return twice


def broken_bytes(sent: Iterable[Sent]) -> int:
    """What left the proxy in pieces that broke: some of it came again."""
    return sum(o.nbytes for some in objects(sent).values() for o in some if not o.is_whole)


class _Away(Exception):
    """The server is away."""


def _server(proxy: S3Proxy, client: int) -> ThreadingHTTPServer:
    upstream = urlsplit(proxy.upstream)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        timeout = LIMIT_SECONDS

        def setup(self) -> None:
            super().setup()
            self._last: Sent | None = None
            self._behind = http.client.HTTPConnection(
                upstream.hostname or "", upstream.port, timeout=LIMIT_SECONDS
            )

        def handle_one_request(self) -> None:
            """Waits for the next one; by then it shows what became of the last answer."""
            if self._last is not None and self._last.nbytes == self._last.asked:
                came = select.select([self.connection], [], [], KEPT_SECONDS)[0]
                self._last.is_whole = not came or self._has_bytes()
            self._last = None
            super().handle_one_request()

        def _has_bytes(self) -> bool:
            with contextlib.suppress(OSError):
                return bool(self.connection.recv(1, socket.MSG_PEEK))
            return False

        def finish(self) -> None:
            self._behind.close()
            with contextlib.suppress(OSError):
                super().finish()

        def _pass(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            key = unquote(urlsplit(self.path).path)
            try:
                asked = Asked(self.command, key, dict(self.headers), self.wfile.write)
                if proxy.is_away or proxy.intercept(asked):
                    raise _Away
                self._forward(key, body)
            except (OSError, http.client.HTTPException, _Away):
                self.close_connection = True

        do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _pass

        def _forward(self, key: str, body: bytes) -> None:
            try:
                answer = self._answered(body)
            except (ConnectionError, http.client.HTTPException):
                self._behind.close()  # it had been idle for too long for the server
                answer = self._answered(body)
            length = answer.getheader("content-length")
            whole = answer.read() if length is None else None
            nbytes = int(length) if whole is None and length is not None else len(whole or b"")
            self.send_response_only(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _HOP:
                    self.send_header(name, value)
            self.send_header("Content-Length", str(nbytes))
            self.end_headers()
            if self.command == "HEAD":
                answer.read()
            elif whole is not None:
                self.wfile.write(whole)
            else:
                self._stream(key, answer, nbytes)

        def _answered(self, body: bytes) -> http.client.HTTPResponse:
            behind = self._behind
            behind.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                behind.putheader(name, value)
            behind.endheaders(body or None)
            return behind.getresponse()

        def _stream(self, key: str, answer: http.client.HTTPResponse, nbytes: int) -> None:
            limits = proxy.limits_of(client, key)
            grain = min([GRAIN_BYTES, *(limit.grain_bytes for limit in limits)])
            done = 0
            try:
                while done < nbytes:
                    piece = answer.read(min(grain, nbytes - done))
                    if not piece or proxy.is_away:
                        raise _Away
                    for limit in limits:
                        limit.take(len(piece))
                    self.wfile.write(piece)
                    done += len(piece)
            finally:
                if self.command == "GET" and answer.status in (200, 206):
                    told = self.headers.get("range", "bytes=0-")
                    start = int(told.removeprefix("bytes=").partition("-")[0])
                    self._last = Sent(client, key, start, nbytes, done, time.monotonic())
                    proxy.note(self._last)

        def log_message(self, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False
        request_queue_size = 128

        def handle_error(self, *args: object) -> None:
            pass  # a client that closed its connection

    return Server(("127.0.0.1", 0), Handler)
