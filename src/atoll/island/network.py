"""The link over an ordinary network: HTTP for control, gRPC for frames. Islands only dial out."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from urllib.parse import urlsplit

import grpc
import httpx
from pydantic import BaseModel, ValidationError

from atoll import errors
from atoll.errors import AtollError, ConfigError, CoordinatorUnreachable, ProtocolError
from atoll.island import pinning
from atoll.island.link import DownloadProgress, FrameSource
from atoll.island.pinning import Trust
from atoll.protocol.messages import (
    Assignment,
    AssignmentRequest,
    Done,
    ErrorReply,
    EvaluationReport,
    HeartbeatReply,
    HeartbeatRequest,
    Identity,
    Info,
    LeaveRequest,
    RegisterReply,
    RegisterRequest,
    Status,
)
from atoll.wire.proto import transfer_pb2, transfer_pb2_grpc

CHUNK_BYTES = 1 << 20  # measured: the fastest chunk of a Python gRPC stream on loopback
MAX_REPLY_BYTES = 16 << 20
CONTROL_SECONDS = 30.0
TRANSFER_SECONDS = 3600.0
_MAX_MESSAGE_BYTES = (4 << 20) + (64 << 10)

R = TypeVar("R", bound=BaseModel)


class NetworkLink:
    """One island's connections to a coordinator. Thread-safe."""

    def __init__(self, url: str, *, token: str, fingerprint: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url={url!r} must be http://host:port or https://host:port")
        self._host = parts.hostname
        self._secure = parts.scheme == "https"
        self._token = token
        self._port = parts.port or (443 if self._secure else 80)
        if fingerprint is not None and not self._secure:
            raise ConfigError(f"a fingerprint needs an https:// url, not {url!r}")
        self._fingerprint = fingerprint
        self._base = f"{parts.scheme}://{parts.netloc}"
        self._lock = threading.Lock()
        self._trust: Trust | None = None
        self._http: httpx.Client | None = None
        self._channel: grpc.Channel | None = None
        self._channel_port = 0
        self._sent = 0
        self._received = 0

    @property
    def bytes_sent(self) -> int:
        return self._sent

    @property
    def bytes_received(self) -> int:
        return self._received

    def close(self) -> None:
        """Ends all connections."""
        if self._http is not None:
            self._http.close()
        if self._channel is not None:
            self._channel.close()

    # Control plane

    def info(self) -> Info:
        info = self._ask("GET", "/info", None, Info)
        with self._lock:
            if self._channel_port != info.transfer_port:
                # A restarted coordinator may listen on another port.
                if self._channel is not None:
                    self._channel.close()
                self._channel = self._open_channel(info.transfer_port)
                self._channel_port = info.transfer_port
        return info

    def status(self) -> Status:
        """What an operator sees."""
        return self._ask("GET", "/status", None, Status)

    def register(self, request: RegisterRequest) -> RegisterReply:
        return self._ask("POST", "/workers/register", request, RegisterReply)

    def leave(self, identity: Identity) -> None:
        path = f"/workers/{identity.worker_id}"
        self._ask("DELETE", path, LeaveRequest(identity=identity), Done)

    def heartbeat(self, request: HeartbeatRequest) -> HeartbeatReply:
        path = f"/workers/{request.identity.worker_id}/heartbeat"
        return self._ask("POST", path, request, HeartbeatReply)

    def assignment(self, request: AssignmentRequest) -> Assignment:
        path = f"/workers/{request.identity.worker_id}/assignment"
        return self._ask("POST", path, request, Assignment)

    def evaluation(self, report: EvaluationReport) -> None:
        self._ask("POST", f"/workers/{report.identity.worker_id}/evaluation", report, Done)

    def ledger(self, write: Callable[[bytes], object]) -> None:
        """Streams a consistent copy of the ledger into `write`; needs the admin role."""
        client = self._client()
        try:
            with client.stream("GET", "/ledger") as reply:
                if reply.status_code != 200:
                    reply.read()
                    raise _refusal(reply)
                for piece in reply.iter_bytes():
                    write(piece)
        except httpx.HTTPError as exc:
            raise CoordinatorUnreachable(f"no answer from {self._base}/ledger: {exc}") from exc

    def _ask(self, method: str, path: str, body: BaseModel | None, reply: type[R]) -> R:
        content = None if body is None else body.model_dump_json().encode()
        try:
            response = self._client().request(method, path, content=content)
        except httpx.HTTPError as exc:
            raise CoordinatorUnreachable(
                f"no answer from {self._base}{path}: {exc or type(exc).__name__}"
            ) from exc
        if response.status_code != 200:
            raise _refusal(response)
        try:
            return reply.model_validate_json(response.content)
        except ValidationError as exc:
            first = exc.errors(include_url=False)[0]
            name = ".".join(str(part) for part in first["loc"])
            raise ProtocolError(
                f"{path} of {self._base} answers without a good {name!r}: {first['msg']}; "
                f"run the same release of atoll on both sides"
            ) from exc

    def _client(self) -> httpx.Client:
        with self._lock:
            if self._http is None:
                self._http = httpx.Client(
                    base_url=self._base,
                    headers={
                        "authorization": f"Bearer {self._token}",
                        "content-type": "application/json",
                    },
                    timeout=CONTROL_SECONDS,
                    verify=self._trusted().context() if self._secure else False,
                    trust_env=False,
                )
            return self._http

    def _trusted(self) -> Trust:
        if self._trust is None:
            self._trust = (
                Trust(None)
                if self._fingerprint is None
                else pinning.pin(self._host, self._port, self._fingerprint)
            )
        return self._trust

    # Data plane

    def _open_channel(self, port: int) -> grpc.Channel:
        options: list[tuple[str, Any]] = [
            ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.enable_http_proxy", 0),
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.max_reconnect_backoff_ms", 2000),
        ]
        where = f"{self._host}:{port}"
        if not self._secure:
            return grpc.insecure_channel(where, options=options)
        pem = self._trusted().pem
        if pem is not None:
            options.append(("grpc.ssl_target_name_override", pinning.SERVER_NAME))
        return grpc.secure_channel(where, grpc.ssl_channel_credentials(pem), options=options)

    def _stub(self) -> transfer_pb2_grpc.TransferStub:
        if self._channel is None:
            self.info()
        assert self._channel is not None
        return transfer_pb2_grpc.TransferStub(self._channel)  # type: ignore[no-untyped-call] # generated

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self._token}"),)

    def upload(
        self, identity: Identity, frame: FrameSource, *, before_commit: Callable[[], None]
    ) -> str:
        with self._transfer_errors():
            opened = transfer_pb2.UploadOpen(
                identity=_identity(identity),
                preamble=frame.preamble,
                sha256=frame.sha256,
                nbytes=frame.nbytes,
            )
            known = self._stub().Offset(opened, metadata=self._metadata(), timeout=CONTROL_SECONDS)
            opened.offset = known.offset if known.offset < frame.nbytes else 0
            receipt = self._stub().Upload(
                self._parts(opened, frame, before_commit),
                metadata=self._metadata(),
                timeout=TRANSFER_SECONDS,
            )
            return str(receipt.receipt)

    def _parts(
        self,
        opened: transfer_pb2.UploadOpen,
        frame: FrameSource,
        before_commit: Callable[[], None],
    ) -> Iterator[transfer_pb2.UploadPart]:
        yield transfer_pb2.UploadPart(open=opened)
        offset = opened.offset
        while offset < frame.nbytes:
            data = frame.read(offset, CHUNK_BYTES)
            yield transfer_pb2.UploadPart(data=data)
            offset += len(data)
            self._sent += len(data)
        before_commit()
        yield transfer_pb2.UploadPart(commit=True)

    def download(
        self,
        identity: Identity,
        *,
        have_digest: str,
        progress: DownloadProgress,
        sink: Callable[[bytes], None],
    ) -> None:
        with self._transfer_errors():
            parts = self._stub().Download(
                transfer_pb2.DownloadRequest(
                    identity=_identity(identity),
                    have_digest=have_digest,
                    tag=progress.tag,
                    offset=progress.offset,
                ),
                metadata=self._metadata(),
                timeout=TRANSFER_SECONDS,
            )
            nbytes = -1
            for part in parts:
                if part.WhichOneof("part") == "open":
                    progress.opened(part.open.tag, part.open.offset)
                    nbytes = part.open.nbytes
                    continue
                sink(part.data)
                progress.offset += len(part.data)
                self._received += len(part.data)
            if progress.offset != nbytes:
                raise CoordinatorUnreachable(
                    f"the download ended at byte {progress.offset} of {nbytes}"
                )

    @contextlib.contextmanager
    def _transfer_errors(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as exc:
            error = _rpc_error(exc)
            if isinstance(error, CoordinatorUnreachable):
                # The coordinator may come back on another port: ask /info before the next try.
                self._channel_port = 0
                with contextlib.suppress(AtollError):
                    self.info()
            raise error from exc


def _refusal(response: httpx.Response) -> AtollError:
    try:
        reply = ErrorReply.model_validate_json(response.content[:MAX_REPLY_BYTES])
    except ValidationError:
        if response.status_code >= 500:
            return CoordinatorUnreachable(f"{response.url} answers {response.status_code}")
        return ProtocolError(f"{response.url} answers {response.status_code}; is it a coordinator?")
    return errors.from_code(reply.code, reply.message)


def _rpc_error(exc: grpc.RpcError) -> AtollError:
    call: Any = exc
    metadata = {str(key): str(value) for key, value in (call.trailing_metadata() or ())}
    if "atoll-code" in metadata:
        return errors.from_code(metadata["atoll-code"], str(call.details()))
    return CoordinatorUnreachable(f"transfer broken: {call.code()}: {call.details()}")


def _identity(identity: Identity) -> transfer_pb2.Identity:
    return transfer_pb2.Identity(
        run_id=identity.run_id,
        manifest_sha256=identity.manifest_sha256,
        worker_id=identity.worker_id,
        incarnation=identity.incarnation,
        island_key=identity.island_key,
    )
