"""The link over an ordinary network: HTTP for messages, gRPC for frames and presence."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import grpc
from pydantic import BaseModel

from atoll.client.http import CONTROL_SECONDS, HttpClient
from atoll.errors import CoordinatorUnreachable, FrameError, StoreError
from atoll.island.link.base import Download, FrameSource, Work
from atoll.island.link.rank import Part
from atoll.protocol.exchange import Ask
from atoll.protocol.messages import Identity, Info, InfoRequest
from atoll.traffic import Traffic
from atoll.wire import chunks, rpc
from atoll.wire.proto import transfer_pb2
from atoll.wire.proto.transfer_pb2 import PartOpen, PartPiece, UploadOpen, UploadPart
from atoll.wire.transfer_calls import TransferCalls

TRANSFER_SECONDS = 3600.0
_MAX_MESSAGE_BYTES = 2 << 20

R = TypeVar("R", bound=BaseModel)


class Body(Protocol):
    """What is sent after the message that opens a stream."""

    @property
    def nbytes(self) -> int: ...

    @property
    def read(self) -> Callable[[int, int], bytes]: ...


class NetworkLink:
    """One island's connections to a coordinator, to which it only dials out. Thread-safe."""

    def __init__(
        self, url: str, *, token: str, fingerprint: str | None = None, insecure: bool = False
    ) -> None:
        self.traffic = Traffic()
        self._http = HttpClient(url, token=token, fingerprint=fingerprint, insecure=insecure)
        self._metadata = (("authorization", self._http.authorization),)
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._channel_port = 0

    @property
    def is_secure(self) -> bool:
        """Whether the coordinator is spoken to over TLS."""
        return self._http.secure

    def close(self) -> None:
        """Ends all connections."""
        self._http.close()
        if self._channel is not None:
            self._channel.close()

    def send(self, message: Ask[R], *, alone: bool = False) -> R:  # noqa: ARG002  # always
        reply = self._http.send(message)
        if isinstance(reply, Info):
            self._dial(reply.transfer_port)
        return reply

    def _dial(self, port: int) -> None:
        with self._lock:
            if self._channel_port != port:
                # A restarted coordinator may listen on another port. The earlier channel is not
                # closed: a call of another thread may be under way on it, and ends it by ending.
                self._channel = self._open_channel(port)
                self._channel_port = port

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
        where = f"{self._http.host}:{port}"
        if not self._http.secure:
            return grpc.insecure_channel(where, options=options)
        trust = self._http.trust()
        if trust.name is not None:
            options.append(("grpc.ssl_target_name_override", trust.name))
        return grpc.secure_channel(where, grpc.ssl_channel_credentials(trust.pem), options=options)

    def _calls(self) -> TransferCalls:
        if not self._channel_port:
            # Also after a broken transfer: the coordinator may have come back on another port.
            self.send(InfoRequest())
        assert self._channel is not None
        return TransferCalls(self._channel)

    def upload(self, identity: Identity, frame: FrameSource, *, before_commit: Work) -> str:
        opened = UploadOpen(
            identity=_identity(identity),
            preamble=frame.preamble,
            sha256=frame.sha256,
            nbytes=frame.nbytes,
        )
        with self._transfer_errors():
            known = self._calls().offset(opened, metadata=self._metadata, timeout=CONTROL_SECONDS)
        opened.offset = known.offset
        try:
            return self._send(opened, frame, before_commit)
        except FrameError:
            if not opened.offset:
                raise
            # What the coordinator had of it is gone or was bad: once more, from the first byte.
            opened.offset = 0
            return self._send(opened, frame, before_commit)

    def _send(self, opened: UploadOpen, frame: FrameSource, before_commit: Work) -> str:
        taken = self._stream(
            lambda calls: calls.upload,
            UploadPart(open=opened),
            frame,
            UploadPart(commit=True),
            offset=opened.offset,
            before_commit=before_commit,
        )
        return str(taken.receipt)

    def _stream(
        self,
        method: Callable[[TransferCalls], Callable[..., Any]],
        first: Any,
        body: Body,
        last: Any,
        *,
        offset: int,
        before_commit: Work = lambda: None,
    ) -> Any:
        """Sends `first`, the body from `offset` on, and `last`; the answer to all of it."""
        broken: list[Exception] = []

        def parts() -> Iterator[Any]:
            """What is sent; gRPC swallows an exception of an iterator, so `broken` gets it."""
            yield first
            at = offset
            try:
                while at < body.nbytes:
                    data = body.read(at, min(chunks.CHUNK_BYTES, body.nbytes - at))
                    if not data:
                        raise StoreError(
                            f"the body ends at byte {at} of {body.nbytes}; it was cut on disk"
                        )
                    yield chunks.data_part(data)
                    at += len(data)
                    self.traffic.sent += len(data)
                before_commit()
            except Exception as exc:
                broken.append(exc)
                raise
            yield last

        try:
            with self._transfer_errors():
                call = method(self._calls())
                return call(parts(), metadata=self._metadata, timeout=TRANSFER_SECONDS)
        except CoordinatorUnreachable:
            if broken:  # here, not on the way: sending again would meet it again
                raise broken[0] from None
            raise

    def upload_part(self, identity: Identity, part: Part) -> None:
        opened = PartOpen(
            identity=_identity(identity),
            group=part.group,
            round=part.round,
            sha256=part.sha256,
            nbytes=part.nbytes,
        )
        with self._transfer_errors():
            calls = self._calls()
            known = calls.part_offset(opened, metadata=self._metadata, timeout=CONTROL_SECONDS)
        opened.offset = known.offset
        self._stream(
            lambda calls: calls.send_part,
            PartPiece(open=opened),
            part,
            PartPiece(commit=True),
            offset=opened.offset,
        )

    def fetch(self, identity: Identity, sha256: str, *, offset: int, nbytes: int) -> bytes:
        request = transfer_pb2.FetchRequest(
            identity=_identity(identity), sha256=sha256, offset=offset, nbytes=nbytes
        )
        found = bytearray()
        with self._transfer_errors():
            call = self._calls().fetch
            for part in call(request, metadata=self._metadata, timeout=TRANSFER_SECONDS):
                if not isinstance(part, memoryview) or len(found) + len(part) > nbytes:
                    raise FrameError(
                        f"more than the {nbytes} bytes of {sha256[:16]} that were asked for came; "
                        f"run the same release of atoll on both sides"
                    )
                found += part
                self.traffic.received += len(part)
        if len(found) != nbytes:
            raise CoordinatorUnreachable(
                f"a fetch of {sha256[:16]} ended at byte {len(found)} of {nbytes}"
            )
        return bytes(found)

    def download(self, wanted: Download) -> None:
        progress = wanted.progress
        request = transfer_pb2.DownloadRequest(
            identity=_identity(wanted.identity),
            round=wanted.round_number,
            have_digest=wanted.have_digest,
            tag=progress.tag,
            offset=progress.offset,
        )
        nbytes = -1
        with self._transfer_errors():
            call = self._calls().download
            for part in call(request, metadata=self._metadata, timeout=TRANSFER_SECONDS):
                if not isinstance(part, memoryview):
                    progress.opened(part.open.tag, part.open.offset)
                    nbytes = part.open.nbytes
                    continue
                wanted.sink(part)
                progress.offset += len(part)
                self.traffic.received += len(part)
            if progress.offset != nbytes:
                raise CoordinatorUnreachable(
                    f"the download ended at byte {progress.offset} of {nbytes}"
                )

    def attend(self, identity: Identity) -> "NetworkAttendance":
        with self._transfer_errors():
            opened = transfer_pb2.PresenceOpen(identity=_identity(identity))
            call = self._calls().presence(opened, metadata=self._metadata)
            if next(call, None) is None:
                raise CoordinatorUnreachable("the presence stream ended before it began")
        return NetworkAttendance(call)

    @contextlib.contextmanager
    def _transfer_errors(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as exc:
            error = rpc.error_of(exc)
            if isinstance(error, CoordinatorUnreachable):
                self._channel_port = 0
            raise error from exc


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
                raise rpc.error_of(exc) from exc

    def close(self) -> None:
        self._closed = True
        self._call.cancel()


def _identity(identity: Identity) -> transfer_pb2.Identity:
    return transfer_pb2.Identity(**identity.model_dump())
