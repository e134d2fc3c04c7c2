"""A recording proxy between islands and a coordinator: both planes pass through it unchanged.

It stands where an island dials, forwards every message as it came and keeps what it saw: frames
with their bytes, leases, and what islands said. One thing is another's: the `/info` that islands
read names the proxy's own port for the data plane. Frames are read here by the byte layout of
docs/wire-format.md, not by the code that writes them.
"""

import json
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import httpx

from atoll.wire.proto import transfer_pb2

HOST = "127.0.0.1"
LIMIT_SECONDS = 60.0
SERVICE = transfer_pb2.DESCRIPTOR.services_by_name["Transfer"]
TRAILER_BYTES = 32
_FIXED = struct.Struct("<4sHHI")


@dataclass(frozen=True)
class Frame:
    """One frame that passed, whole."""

    worker_id: str  # who sent or fetched it
    header: dict[str, Any]
    preamble_bytes: int
    nbytes: int  # of the whole frame, as it was on the way

    @classmethod
    def of(cls, worker_id: str, data: bytes) -> "Frame":
        magic, _, _, header_bytes = _FIXED.unpack_from(data)
        assert magic == b"ATOL", magic
        preamble_bytes = _FIXED.size + header_bytes
        header = json.loads(data[_FIXED.size : preamble_bytes])
        return cls(worker_id, {"fragment": 0, **header}, preamble_bytes, len(data))

    @property
    def payload_bytes(self) -> int:
        """What is left of the bytes on the way, whatever the header says."""
        return self.nbytes - self.preamble_bytes - TRAILER_BYTES

    @property
    def tensors(self) -> dict[str, int]:
        """How many elements each tensor in it has."""
        found = {}
        for name, _, shape in self.header["tensors"]:
            found[name] = 1
            for dimension in shape:
                found[name] *= dimension
        return found


@dataclass(frozen=True)
class Lease:
    """Rows that an island was told to train."""

    worker_id: str
    round: int
    rows: int


@dataclass
class Record:
    """What passed, in the order in which it was through."""

    uploads: list[Frame] = field(default_factory=list)
    downloads: list[Frame] = field(default_factory=list)
    leases: list[Lease] = field(default_factory=list)
    said: list[tuple[str, str, Any]] = field(default_factory=list)  # method, path, body

    def of(self, worker_id: str) -> "Record":
        """Frames and leases of one island."""
        return Record(
            [frame for frame in self.uploads if frame.worker_id == worker_id],
            [frame for frame in self.downloads if frame.worker_id == worker_id],
            [lease for lease in self.leases if lease.worker_id == worker_id],
        )


class Proxy:
    """Both planes of one coordinator; `url` is all that an island needs."""

    def __init__(self, url: str) -> None:
        self.record = Record()
        self._lock = threading.Lock()
        self._target = httpx.Client(base_url=url, timeout=LIMIT_SECONDS, trust_env=False)
        self._channels: dict[int, grpc.Channel] = {}
        self._transfer_port = 0  # the coordinator's
        self._pool = ThreadPoolExecutor(16)
        self._transfer = grpc.server(self._pool, handlers=[_Forwarding(self)])
        self._own_port = self._transfer.add_insecure_port(f"{HOST}:0")
        self._http = _http_server(self)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,))

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._http.server_address[1]}"

    def start(self) -> None:
        self._transfer.start()
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
        self._transfer.stop(None).wait()
        for channel in self._channels.values():
            channel.close()
        self._pool.shutdown()
        self._target.close()

    # The control plane

    def passed_on(self, method: str, path: str, body: bytes, token: str) -> tuple[int, bytes]:
        """What the coordinator answers."""
        headers = {"authorization": token, "content-type": "application/json"}
        try:
            reply = self._target.request(method, path, content=body or None, headers=headers)
        except httpx.HTTPError:
            return 502, b""  # as from any proxy whose coordinator is away
        answer = reply.content
        with self._lock:
            said = json.loads(body) if body else None
            self.record.said.append((method, path, said))
            if reply.status_code == 200:
                answer = self._noted(path, said, answer)
        return reply.status_code, answer

    def _noted(self, path: str, said: Any, answer: bytes) -> bytes:
        told = json.loads(answer)
        if path.startswith("/info"):
            self._transfer_port = told["transfer_port"]
            return json.dumps({**told, "transfer_port": self._own_port}).encode()
        if path.endswith("/assignment") and told["action"] == "train":
            rows = sum(one["stop"] - one["start"] for one in told["ranges"])
            worker_id = said["identity"]["worker_id"]
            self.record.leases.append(Lease(worker_id, told["round"], rows))
        return answer

    # The data plane

    @property
    def channel(self) -> Any:
        """The coordinator's; its calls take and give bytes, for which stubs have no words."""
        with self._lock:
            port = self._transfer_port
            if port not in self._channels:
                options = [("grpc.enable_http_proxy", 0)]
                self._channels[port] = grpc.insecure_channel(f"{HOST}:{port}", options=options)
            return self._channels[port]

    def uploaded(self, messages: list[bytes]) -> None:
        """An upload got its receipt."""
        parts = [transfer_pb2.UploadPart.FromString(message) for message in messages]
        opened, data = parts[0].open, b"".join(part.data for part in parts)
        assert not opened.offset and opened.nbytes == len(data), (opened.offset, opened.nbytes)
        with self._lock:
            self.record.uploads.append(Frame.of(opened.identity.worker_id, data))

    def downloaded(self, asked: bytes, messages: list[bytes]) -> None:
        """A download came to its end."""
        request = transfer_pb2.DownloadRequest.FromString(asked)
        parts = [transfer_pb2.DownloadPart.FromString(message) for message in messages]
        opened, data = parts[0].open, b"".join(part.data for part in parts)
        assert not opened.offset and opened.nbytes == len(data), (opened.offset, opened.nbytes)
        with self._lock:
            self.record.downloads.append(Frame.of(request.identity.worker_id, data))


class _Forwarding(grpc.GenericRpcHandler):
    """Every method of the data plane, as bytes."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    def service(self, details: Any) -> Any:
        path = details.method
        return {
            "Offset": lambda: grpc.unary_unary_rpc_method_handler(self._plain(path)),
            "Upload": lambda: grpc.stream_unary_rpc_method_handler(self._upload(path)),
            "Download": lambda: grpc.unary_stream_rpc_method_handler(self._download(path)),
            "Presence": lambda: grpc.unary_stream_rpc_method_handler(self._presence(path)),
        }[path.rpartition("/")[2]]()

    def _plain(self, path: str) -> Callable[..., bytes]:
        def answer(asked: bytes, context: Any) -> bytes:
            call = self._proxy.channel.unary_unary(path)
            with _refusals(context):
                return bytes(call(asked, metadata=_token(context), timeout=LIMIT_SECONDS))

        return answer

    def _upload(self, path: str) -> Callable[..., bytes]:
        def answer(parts: Iterator[bytes], context: Any) -> bytes:
            kept: list[bytes] = []

            def passing() -> Iterator[bytes]:
                for part in parts:
                    kept.append(part)
                    yield part

            call = self._proxy.channel.stream_unary(path)
            with _refusals(context):
                receipt = call(passing(), metadata=_token(context), timeout=LIMIT_SECONDS)
            self._proxy.uploaded(kept)
            return bytes(receipt)

        return answer

    def _download(self, path: str) -> Callable[..., Iterator[bytes]]:
        def answer(asked: bytes, context: Any) -> Iterator[bytes]:
            kept: list[bytes] = []
            call = self._proxy.channel.unary_stream(path)
            with _refusals(context):
                for part in call(asked, metadata=_token(context), timeout=LIMIT_SECONDS):
                    kept.append(part)
                    yield part
            self._proxy.downloaded(asked, kept)

        return answer

    def _presence(self, path: str) -> Callable[..., Iterator[bytes]]:
        def answer(asked: bytes, context: Any) -> Iterator[bytes]:
            call = self._proxy.channel.unary_stream(path)(asked, metadata=_token(context))
            context.add_callback(call.cancel)  # an island that goes is gone there as well
            with _refusals(context):
                yield from call

        return answer


@contextmanager
def _refusals(context: Any) -> Iterator[None]:
    """What the coordinator refuses with, as it came."""
    try:
        yield
    except grpc.RpcError as exc:
        call: Any = exc
        context.set_trailing_metadata(call.trailing_metadata() or ())
        context.abort(call.code(), call.details())


def _token(context: Any) -> list[Any]:
    return [(key, value) for key, value in context.invocation_metadata() if key == "authorization"]


def _http_server(proxy: Proxy) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def _pass(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            token = self.headers.get("authorization", "")
            status, answer = proxy.passed_on(self.command, self.path, body, token)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST = do_DELETE = _pass

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer((HOST, 0), Handler)
    server.daemon_threads = True
    return server


@contextmanager
def recording(url: str) -> Iterator[Proxy]:
    """A proxy in front of the coordinator at `url`, until the block ends."""
    proxy = Proxy(url)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.close()
