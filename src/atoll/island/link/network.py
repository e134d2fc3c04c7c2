"""The link over an ordinary network: HTTP for control, gRPC for frames. Islands only dial out."""

import contextlib
import re
import ssl
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from urllib.parse import urlsplit

import grpc
import httpx
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from atoll import errors
from atoll.errors import (
    AtollError,
    ConfigError,
    CoordinatorUnreachable,
    FrameError,
    ProtocolError,
    StaleGeneration,
    StoreError,
)
from atoll.island.link.base import DownloadProgress, FrameSource
from atoll.protocol.messages import (
    Assignment,
    AssignmentRequest,
    BarrierReply,
    BarrierRequest,
    Done,
    ErrorReply,
    EvaluationReport,
    HeartbeatReply,
    HeartbeatRequest,
    Identity,
    Info,
    LeaveRequest,
    Ready,
    RegisterReply,
    RegisterRequest,
    Status,
    Workers,
)
from atoll.protocol.samples import SamplesRequest
from atoll.protocol.work import Work
from atoll.wire import chunks, pinning
from atoll.wire.pinning import Trust
from atoll.wire.proto import transfer_pb2
from atoll.wire.transfer_calls import TransferCalls

CHUNK_BYTES = 1 << 20  # measured: 2 MiB is a tenth faster on loopback and takes twice the memory
MAX_REPLY_BYTES = 16 << 20
CONTROL_SECONDS = 30.0
TRANSFER_SECONDS = 3600.0
_MAX_MESSAGE_BYTES = 2 << 20
_TOKEN = re.compile(r"[!-~]+\Z")  # what a header can carry

R = TypeVar("R", bound=BaseModel)


class NetworkLink:
    """One island's connections to a coordinator. Thread-safe."""

    def __init__(self, url: str, *, token: str, fingerprint: str | None = None) -> None:
        self._secure, self._host, self._port = _address(url)
        if not _TOKEN.match(token):
            raise ConfigError(
                "the token holds a space, a line end or a letter outside ASCII; "
                "copy it from the join command that `atoll serve` printed"
            )
        self._token = token
        if fingerprint is not None:
            pinning.checked(fingerprint)
            if not self._secure:
                raise ConfigError(f"a fingerprint needs an https:// url, not {url!r}")
        self._fingerprint = fingerprint
        self._base = (
            f"{'https' if self._secure else 'http'}://{_bracketed(self._host)}:{self._port}"
        )
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
        info = self.ask("GET", "/info", None, Info)
        with self._lock:
            if self._channel_port != info.transfer_port:
                # A restarted coordinator may listen on another port. The earlier channel is not
                # closed: a call of another thread may be under way on it, and ends it by ending.
                self._channel = self._open_channel(info.transfer_port)
                self._channel_port = info.transfer_port
        return info

    def status(self) -> Status:
        """What an operator sees."""
        return self.ask("GET", "/status", None, Status)

    def work(self) -> Work:
        """The queues of units, and who has which rows."""
        return self.ask("GET", "/work", None, Work)

    def look(self) -> Info:
        return self.info()

    def register(self, request: RegisterRequest) -> RegisterReply:
        return self.ask("POST", "/workers/register", request, RegisterReply)

    def come_back(self, request: RegisterRequest) -> RegisterReply:
        return self.register(request)

    def leave(self, identity: Identity) -> None:
        path = f"/workers/{identity.worker_id}"
        self.ask("DELETE", path, LeaveRequest(identity=identity), Done)

    def heartbeat(self, request: HeartbeatRequest) -> HeartbeatReply:
        path = f"/workers/{request.identity.worker_id}/heartbeat"
        return self.ask("POST", path, request, HeartbeatReply)

    def workers(self) -> Workers:
        """Every worker that ever registered, and how it fares."""
        return self.ask("GET", "/workers", None, Workers)

    def ready(self, min_workers: int | None = None) -> Ready:
        """Whether so many workers are in, and who, in one generation."""
        query = "" if min_workers is None else f"?min_workers={min_workers}"
        return self.ask("GET", f"/training/ready{query}", None, Ready)

    def barrier(self, name: str, request: BarrierRequest) -> BarrierReply:
        path = f"/generations/{request.identity.generation}/barriers/{name}"
        return self.ask("POST", path, request, BarrierReply)

    def assignment(self, request: AssignmentRequest) -> Assignment:
        path = f"/workers/{request.identity.worker_id}/assignment"
        return self.ask("POST", path, request, Assignment)

    def evaluation(self, report: EvaluationReport) -> None:
        self.ask("POST", f"/workers/{report.identity.worker_id}/evaluation", report, Done)

    def samples(self, request: SamplesRequest) -> None:
        self.ask("POST", f"/workers/{request.identity.worker_id}/samples", request, Done)

    def ledger(self, write: Callable[[bytes], object]) -> None:
        """Streams a consistent copy of the ledger into `write`; needs the admin role."""
        client = self._client()
        try:
            with client.stream("GET", "/ledger") as reply:
                if reply.status_code != 200:
                    raise _refusal(reply, _bounded(reply))
                for piece in reply.iter_bytes():
                    write(piece)
        except httpx.HTTPError as exc:
            raise self._no_answer("/ledger", exc) from exc

    def ask(self, method: str, path: str, body: BaseModel | None, reply: type[R]) -> R:
        """One call of the control plane; the coordinator's refusal as the error it names."""
        content = None if body is None else body.model_dump_json().encode()
        try:
            with self._client().stream(method, path, content=content) as response:
                answer = _bounded(response)
        except httpx.HTTPError as exc:
            raise self._no_answer(path, exc) from exc
        if response.status_code != 200:
            raise _refusal(response, answer)
        try:
            return reply.model_validate_json(answer)
        except ValidationError as exc:
            first = exc.errors(include_url=False)[0]
            name = ".".join(str(part) for part in first["loc"])
            raise ProtocolError(
                f"{path} of {self._base} answers without a good {name!r}: {first['msg']}"
                f"{_given(first)}; "
                f"run the same release of atoll on both sides"
            ) from exc

    def _no_answer(self, path: str, exc: httpx.HTTPError) -> AtollError:
        cause: BaseException | None = exc
        while cause is not None:
            if isinstance(cause, ssl.SSLCertVerificationError):
                # Asking again would not help, and a person must decide.
                return ConfigError(
                    f"the certificate of {self._base} is not trusted here "
                    f"({cause.verify_message}); give --fingerprint from the join command"
                )
            cause = cause.__cause__ or cause.__context__
        return CoordinatorUnreachable(
            f"no answer from {self._base}{path}: {str(exc) or type(exc).__name__}"
        )

    def _client(self) -> httpx.Client:
        with self._lock:
            if self._http is None:
                self._http = httpx.Client(
                    base_url=self._base,
                    headers={
                        "authorization": f"Bearer {self._token}",
                        "content-type": "application/json",
                        # What is small on the way and large here would pass a bound on the way.
                        "accept-encoding": "identity",
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
        where = f"{_bracketed(self._host)}:{port}"
        if not self._secure:
            return grpc.insecure_channel(where, options=options)
        trust = self._trusted()
        if trust.name is not None:
            options.append(("grpc.ssl_target_name_override", trust.name))
        return grpc.secure_channel(where, grpc.ssl_channel_credentials(trust.pem), options=options)

    def _calls(self) -> TransferCalls:
        if not self._channel_port:
            # Also after a broken transfer: the coordinator may have come back on another port.
            self.info()
        assert self._channel is not None
        return TransferCalls(self._channel)

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self._token}"),)

    def upload(
        self, identity: Identity, frame: FrameSource, *, before_commit: Callable[[], None]
    ) -> str:
        opened = transfer_pb2.UploadOpen(
            identity=_identity(identity),
            preamble=frame.preamble,
            sha256=frame.sha256,
            nbytes=frame.nbytes,
        )
        with self._transfer_errors():
            known = self._calls().offset(opened, metadata=self._metadata(), timeout=CONTROL_SECONDS)
        opened.offset = known.offset
        try:
            return self._send(opened, frame, before_commit)
        except FrameError:
            if not opened.offset:
                raise
            # What the coordinator had of it is gone or was bad: once more, from the first byte.
            opened.offset = 0
            return self._send(opened, frame, before_commit)

    def _send(
        self,
        opened: transfer_pb2.UploadOpen,
        frame: FrameSource,
        before_commit: Callable[[], None],
    ) -> str:
        broken: list[Exception] = []
        try:
            with self._transfer_errors():
                receipt = self._calls().upload(
                    self._parts(opened, frame, before_commit, broken),
                    metadata=self._metadata(),
                    timeout=TRANSFER_SECONDS,
                )
        except CoordinatorUnreachable:
            if broken:  # here, not on the way: sending again would meet it again
                raise broken[0] from None
            raise
        return str(receipt.receipt)

    def _parts(
        self,
        opened: transfer_pb2.UploadOpen,
        frame: FrameSource,
        before_commit: Callable[[], None],
        broken: list[Exception],
    ) -> Iterator[transfer_pb2.UploadPart | bytes]:
        """What is sent; gRPC swallows an exception of this iterator, so it is left in `broken`."""
        yield transfer_pb2.UploadPart(open=opened)
        offset = opened.offset
        try:
            while offset < frame.nbytes:
                data = frame.read(offset, CHUNK_BYTES)
                if not data:
                    raise StoreError(
                        f"the frame ends at byte {offset} of {frame.nbytes}; it was cut on disk"
                    )
                yield chunks.data_part(data)
                offset += len(data)
                self._sent += len(data)
            before_commit()
        except Exception as exc:
            broken.append(exc)
            raise
        yield transfer_pb2.UploadPart(commit=True)

    def download(
        self,
        identity: Identity,
        *,
        have_digest: str,
        progress: DownloadProgress,
        sink: Callable[[bytes | memoryview], None],
    ) -> None:
        with self._transfer_errors():
            parts = self._calls().download(
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
                if not isinstance(part, memoryview):
                    progress.opened(part.open.tag, part.open.offset)
                    nbytes = part.open.nbytes
                    continue
                sink(part)
                progress.offset += len(part)
                self._received += len(part)
            if progress.offset != nbytes:
                raise CoordinatorUnreachable(
                    f"the download ended at byte {progress.offset} of {nbytes}"
                )

    def attend(self, identity: Identity) -> "NetworkAttendance":
        with self._transfer_errors():
            call = self._calls().presence(
                transfer_pb2.PresenceOpen(identity=_identity(identity)), metadata=self._metadata()
            )
            if next(call, None) is None:
                raise CoordinatorUnreachable("the presence stream ended before it began")
        return NetworkAttendance(call)

    @contextlib.contextmanager
    def _transfer_errors(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as exc:
            error = _rpc_error(exc)
            if isinstance(error, CoordinatorUnreachable):
                self._channel_port = 0
            raise error from exc


def _given(error: ErrorDetails) -> str:
    """The value that breaks a rule, where it is a plain one."""
    value = error["input"]
    return f" (it says {value!r})" if isinstance(value, (str, int, float, bool)) else ""


class NetworkAttendance:
    """An open presence stream of gRPC."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._closed = False

    def wait(self) -> None:
        try:
            for _ in self._call:
                pass
        except grpc.RpcError as exc:
            if not self._closed:
                raise _rpc_error(exc) from exc

    def close(self) -> None:
        self._closed = True
        self._call.cancel()


def _bounded(response: httpx.Response) -> bytes:
    """The body as it was sent; ProtocolError as soon as it is longer than any reply."""
    body = bytearray()
    for piece in response.iter_raw():
        body += piece
        if len(body) > MAX_REPLY_BYTES:
            raise ProtocolError(
                f"{response.url} answers {response.status_code} with more than "
                f"{MAX_REPLY_BYTES} bytes; is it a coordinator?"
            )
    return bytes(body)


def _refusal(response: httpx.Response, body: bytes) -> AtollError:
    try:
        reply = ErrorReply.model_validate_json(body)
    except ValidationError:
        if response.status_code >= 500:
            return CoordinatorUnreachable(f"{response.url} answers {response.status_code}")
        return ProtocolError(f"{response.url} answers {response.status_code}; is it a coordinator?")
    error = _reported(reply.code, reply.message, retry=reply.retry)
    if isinstance(error, StaleGeneration):
        error.present = reply.generation or 0
    return error


def _rpc_error(exc: grpc.RpcError) -> AtollError:
    call: Any = exc
    metadata = {str(key): str(value) for key, value in (call.trailing_metadata() or ())}
    if "atoll-code" in metadata:
        retry = metadata.get("atoll-retry") == "true"
        error = _reported(metadata["atoll-code"], str(call.details()), retry=retry)
        if isinstance(error, StaleGeneration):
            error.present = _number(metadata.get("atoll-generation", ""))
        return error
    return CoordinatorUnreachable(f"transfer broken: {call.code()}: {call.details()}")


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0


def _reported(code: str, message: str, *, retry: bool) -> AtollError:
    """The error that the coordinator named; one it says may pass later is worth another try."""
    error = errors.from_code(code, message)
    if retry and not error.retry:
        return CoordinatorUnreachable(f"{message} (code {code!r})")
    return error


def _address(url: str) -> tuple[bool, str, int]:
    """Whether `url` is secure, its host and its port; ConfigError for anything else in it."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as exc:
        raise ConfigError(f"url={url!r} must be http://host:port or https://host:port") from exc
    bare = not parts.path.strip("/") and not parts.query and parts.username is None
    if parts.scheme not in ("http", "https") or not parts.hostname or not bare:
        raise ConfigError(f"url={url!r} must be http://host:port or https://host:port")
    secure = parts.scheme == "https"
    return secure, parts.hostname, port or (443 if secure else 80)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _identity(identity: Identity) -> transfer_pb2.Identity:
    return transfer_pb2.Identity(
        run_id=identity.run_id,
        manifest_sha256=identity.manifest_sha256,
        worker_id=identity.worker_id,
        incarnation=identity.incarnation,
        island_key=identity.island_key,
        generation=identity.generation,
    )
