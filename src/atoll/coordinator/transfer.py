"""The data plane: gRPC methods that move chunks between islands and the coordinator.

Hashing, decoding and disk run in worker threads, so the event loop keeps answering heartbeats.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from pydantic import ValidationError

from atoll.coordinator import status
from atoll.coordinator.access import Access, Role
from atoll.coordinator.admission import UploadRequest
from atoll.coordinator.service import Coordinator
from atoll.errors import AtollError, FrameError, ProtocolError, StoreError
from atoll.ledger.records import ContributionRecord
from atoll.protocol.messages import Identity
from atoll.wire import frame
from atoll.wire.proto import transfer_pb2

log = logging.getLogger(__name__)

T = TypeVar("T")
M = TypeVar("M", bound=Message)

CHUNK_BYTES = 1 << 20  # measured: 1 MiB is the fastest chunk of a Python gRPC stream on loopback
MAX_MESSAGE_BYTES = 2 << 20  # one chunk and room; a stranger makes the server hold no more
_SERVICE = transfer_pb2.DESCRIPTOR.services_by_name["Transfer"]
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
if TYPE_CHECKING:  # grpc's classes are generic in their stubs only
    Context = grpc.aio.ServicerContext[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]


def options() -> list[tuple[str, int]]:
    """Limits of every connection."""
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_concurrent_streams", 256),
        ("grpc.max_metadata_size", 16 << 10),
        ("grpc.so_reuseport", 0),  # a second coordinator on the port must be told, not shared with
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5000),
    ]


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses every call without a worker's token before its handler runs."""

    def __init__(self, access: Access, *, count: Callable[[AtollError], None]) -> None:
        self._access = access
        self._count = count

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]",
        details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        handler = await continuation(details)
        metadata = {str(key): str(value) for key, value in details.invocation_metadata or ()}
        try:
            self._access.require(metadata.get("authorization"), Role.WORKER)
        except AtollError as error:
            self._count(error)
            return _refusing(handler, error)
        return handler


class TransferService:
    """Uploads and downloads of one coordinator; the methods are named as the service has them."""

    def __init__(self, coordinator: Coordinator, pool: ThreadPoolExecutor) -> None:
        self._coordinator = coordinator
        self._pool = pool

    async def Offset(
        self, request: transfer_pb2.UploadOpen | None, context: "Context"
    ) -> transfer_pb2.UploadOffset:
        async with _answering(context):
            opened = _upload_request(_readable(request))
            offset = await self._run(self._coordinator.upload_offset, opened)
        return transfer_pb2.UploadOffset(offset=offset)

    async def Upload(
        self, parts: AsyncIterator[transfer_pb2.UploadPart | None], context: "Context"
    ) -> transfer_pb2.Receipt:
        async with _answering(context):
            record = await self._receive(parts)
        return _receipt(record)

    async def _receive(
        self, parts: AsyncIterator[transfer_pb2.UploadPart | None]
    ) -> ContributionRecord:
        first = _readable(await anext(parts, transfer_pb2.UploadPart()))
        if first.WhichOneof("part") != "open":
            raise FrameError("an upload begins with `open`; send the header first")
        upload = await self._run(self._coordinator.begin_upload, _upload_request(first.open))
        if isinstance(upload, ContributionRecord):
            return upload
        stream = upload.stream
        async for part in parts:
            kind = _readable(part).WhichOneof("part")
            if kind == "commit":
                return await self._run(self._coordinator.commit_upload, upload, stream)
            if kind != "data":
                raise FrameError(f"an upload goes on with `data` or `commit`, not {kind!r}")
            data = _readable(part).data
            await self._run(self._coordinator.write_upload, upload, stream, data)
        raise FrameError(
            f"the upload ended without `commit` after {upload.offset} bytes; resume there"
        )

    async def Download(
        self, asked: transfer_pb2.DownloadRequest | None, context: "Context"
    ) -> AsyncIterator[transfer_pb2.DownloadPart]:
        async with _answering(context):
            request = _readable(asked)
            identity = _identity(request.identity)
            spooled = await self._run(
                lambda: self._coordinator.download(identity, have_digest=request.have_digest)
            )
            resumes = request.tag == spooled.tag and request.offset <= spooled.nbytes
            offset = request.offset if resumes else 0
            yield transfer_pb2.DownloadPart(
                open=transfer_pb2.DownloadOpen(
                    tag=spooled.tag,
                    nbytes=spooled.nbytes,
                    offset=offset,
                    version=spooled.header.round,
                )
            )
            while offset < spooled.nbytes:
                data = await self._run(spooled.read, offset, CHUNK_BYTES)
                if not data:
                    raise StoreError(
                        f"{str(spooled.path)!r} ends at byte {offset} of {spooled.nbytes}; "
                        f"restart the coordinator, which computes it again"
                    )
                yield transfer_pb2.DownloadPart(data=data)
                offset += len(data)
                self._coordinator.sent(identity, len(data))

    async def _run(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)


def _upload_request(message: transfer_pb2.UploadOpen) -> UploadRequest:
    if len(message.preamble) > frame.MAX_PREAMBLE_BYTES:
        raise FrameError(
            f"the preamble has {len(message.preamble)} bytes; "
            f"at most {frame.MAX_PREAMBLE_BYTES} are allowed"
        )
    if not _SHA256.match(message.sha256):
        raise FrameError(
            f"sha256={message.sha256[:80]!r} must be 64 lower-case hex digits: the name of the "
            f"whole frame"
        )
    return UploadRequest(
        identity=_identity(message.identity),
        preamble=message.preamble,
        sha256=message.sha256,
        nbytes=message.nbytes,
        offset=message.offset,
    )


def _identity(message: transfer_pb2.Identity) -> Identity:
    try:
        return Identity(
            run_id=message.run_id,
            manifest_sha256=message.manifest_sha256,
            worker_id=message.worker_id,
            incarnation=message.incarnation,
            island_key=message.island_key,
        )
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        raise ProtocolError(f"identity.{first['loc'][0]}: {first['msg']}") from exc


def _receipt(record: ContributionRecord) -> transfer_pb2.Receipt:
    return transfer_pb2.Receipt(
        round=record.round,
        worker_id=record.worker_id,
        sha256=record.sha256,
        receipt=record.receipt,
    )


def trailing(error: AtollError) -> tuple[tuple[str, str], ...]:
    """The error's code as trailing metadata; the sentence travels as the status detail."""
    return (("atoll-code", error.code), ("atoll-retry", str(error.retry).lower()))


async def _abort(context: "Context", error: AtollError) -> NoReturn:
    await context.abort(status.rpc(error), status.sentence(error), trailing(error))


@asynccontextmanager
async def _answering(context: "Context") -> AsyncIterator[None]:
    """Every way out of a method: typed errors by the table, accidents without their text."""
    try:
        yield
    except AtollError as error:
        if status.http(error) >= 500 and not error.retry:
            log.error("a transfer found a fault", extra={"code": error.code, "reason": str(error)})
        await _abort(context, error)
    except grpc.aio.AbortError:
        raise
    except Exception:
        log.exception("a transfer met an unexpected error")
        await context.abort(
            grpc.StatusCode.INTERNAL,
            status.ACCIDENT,
            (("atoll-code", status.INTERNAL), ("atoll-retry", "true")),
        )


def _refusing(handler: "Handler | None", error: AtollError) -> "Handler":
    """A handler of the same shape that refuses; it reads nothing of what was sent."""

    async def refuse(_: object, context: "Context") -> None:
        await _abort(context, error)

    if handler is None:
        return _KINDS[(False, False)](refuse)
    return _KINDS[(handler.request_streaming, handler.response_streaming)](refuse)


# Whether a stream comes in, whether one goes out.
_KINDS: "dict[tuple[bool, bool], Callable[..., Handler]]" = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def handlers(service: TransferService) -> grpc.GenericRpcHandler:
    """Every method of `service`, from the service's own description.

    The generated registration would let gRPC answer for bytes that are no message, with a
    traceback in the log and no code; here they arrive as None.
    """
    return grpc.method_handlers_generic_handler(
        _SERVICE.full_name,
        {
            method.name: _KINDS[(method.client_streaming, method.server_streaming)](
                getattr(service, method.name),
                request_deserializer=_reader(method.input_type),
                response_serializer=_written,
            )
            for method in _SERVICE.methods
        },
    )


def _reader(described: Descriptor) -> Callable[[bytes], Message | None]:
    message_type = message_factory.GetMessageClass(described)

    def read(data: bytes) -> Message | None:
        try:
            return message_type.FromString(data)
        except DecodeError:
            return None

    return read


def _written(message: Message) -> bytes:
    return message.SerializeToString()


def _readable(message: M | None) -> M:
    if message is None:
        raise ProtocolError("what was sent is no message of this method; update the sender")
    return message


def methods() -> Iterable[str]:
    """Every method of the data plane, from the service's own description."""
    return [f"/{_SERVICE.full_name}/{method.name}" for method in _SERVICE.methods]
