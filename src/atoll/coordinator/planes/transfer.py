"""The data plane: gRPC methods that move chunks between islands and the coordinator.

Hashing, decoding and disk run in worker threads, so the event loop keeps answering heartbeats.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from google.protobuf.message import Message
from pydantic import ValidationError

from atoll.coordinator.accept.admission import UploadRequest
from atoll.coordinator.members.presence import Stream
from atoll.coordinator.rounds.spool import SpooledFrame
from atoll.coordinator.service import Coordinator
from atoll.errors import AtollError, FrameError, ProtocolError, StoreError
from atoll.ledger.records import ContributionRecord
from atoll.protocol.messages import Identity
from atoll.wire import chunks, frame, rpc
from atoll.wire.proto import transfer_pb2

T = TypeVar("T")
M = TypeVar("M", bound=Message)

CHUNK_BYTES = 1 << 20  # measured: 2 MiB is a tenth faster on loopback and takes twice the memory
MAX_MESSAGE_BYTES = 2 << 20  # one chunk and room; a stranger makes the server hold no more
_SERVICE = transfer_pb2.DESCRIPTOR.services_by_name["Transfer"]
NO_PART = transfer_pb2.UploadPart()
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
if TYPE_CHECKING:
    from atoll.wire.rpc import Context

    Part = transfer_pb2.UploadPart | memoryview | None  # a view: data alone; None: no message


def options() -> list[tuple[str, int]]:
    """Limits of every connection."""
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_concurrent_streams", 256),
        # Windows stay small: what many islands send at once waits with them, not in this process.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 256 << 10),
        ("grpc.max_metadata_size", 16 << 10),
        ("grpc.so_reuseport", 0),  # a second coordinator on the port must be told, not shared with
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5000),
    ]


class TransferService:
    """Uploads and downloads of one coordinator; the methods are named as the service has them.

    Methods run on the event loop and call the coordinator on threads of the pool.
    """

    def __init__(self, coordinator: Coordinator, pool: ThreadPoolExecutor) -> None:
        self._coordinator = coordinator
        self._pool = pool

    async def Offset(
        self, request: transfer_pb2.UploadOpen | None, context: "Context"
    ) -> transfer_pb2.UploadOffset:
        async with rpc.answering(context):
            opened = self._checked(_upload_request, request)
            offset = await self._run(self._coordinator.upload_offset, opened)
        return transfer_pb2.UploadOffset(offset=offset)

    async def Upload(
        self, parts: AsyncIterator["Part"], context: "Context"
    ) -> transfer_pb2.Receipt:
        async with rpc.answering(context):
            record = await self._receive(parts)
        return _receipt(record)

    async def _receive(self, parts: AsyncIterator["Part"]) -> ContributionRecord:
        first = await anext(parts, NO_PART)
        opened = self._checked(_opening, NO_PART if isinstance(first, memoryview) else first)
        stream = await self._run(self._coordinator.begin_upload, opened)
        if isinstance(stream, ContributionRecord):
            return stream
        writing: Awaitable[None] | None = None
        async for part in parts:
            # One chunk is hashed and written while the next one comes in.
            if writing is not None:
                await writing
            if isinstance(part, memoryview):
                writing = self._run(self._coordinator.write_upload, stream, part)
                continue
            kind = rpc.readable(part).WhichOneof("part")
            if kind != "commit":
                raise FrameError(f"an upload goes on with `data` or `commit`, not {kind!r}")
            return await self._run(self._coordinator.commit_upload, stream)
        if writing is not None:
            await writing
        raise FrameError(
            f"the upload ended without `commit` after {stream.upload.offset} bytes; resume there"
        )

    async def Download(
        self, asked: transfer_pb2.DownloadRequest | None, context: "Context"
    ) -> AsyncIterator[transfer_pb2.DownloadPart | bytes]:
        async with rpc.answering(context):
            request = self._checked(lambda message: message, asked)
            identity = self._checked(_identity, request.identity)
            spooled = await self._run(
                lambda: self._coordinator.download(
                    identity, round_number=request.round, have_digest=request.have_digest
                )
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
                for part, nbytes in await self._run(_parts, spooled, offset):
                    yield part
                    offset += nbytes
                    self._coordinator.sent(identity, nbytes)

    async def Presence(
        self, asked: transfer_pb2.PresenceOpen | None, context: "Context"
    ) -> AsyncIterator[transfer_pb2.PresenceState]:
        async with rpc.answering(context):
            identity = self._checked(lambda message: _identity(message.identity), asked)
            ended = asyncio.Event()
            loop = asyncio.get_running_loop()
            opening = asyncio.ensure_future(
                self._run(
                    lambda: self._coordinator.attend(identity, close=lambda: _set_soon(loop, ended))
                )
            )
            try:
                # Shielded: a caller who is gone by now must be found lost, not kept as present.
                await asyncio.shield(opening)
                yield transfer_pb2.PresenceState(generation=identity.generation)
                await ended.wait()
            finally:
                opening.add_done_callback(self._lost)

    def _lost(self, opening: "asyncio.Future[Stream]") -> None:
        if not opening.cancelled() and opening.exception() is None:
            self._coordinator.absent(opening.result())

    def _checked(self, read: Callable[[M], T], message: M | None) -> T:
        """What `read` makes of a message; what it refuses is counted like any refusal."""
        try:
            return read(rpc.readable(message))
        except AtollError as error:
            self._coordinator.refused(error)
            raise

    def _run(self, work: Callable[..., T], *args: Any) -> Awaitable[T]:
        """Starts `work` in a thread at once."""
        return asyncio.get_running_loop().run_in_executor(self._pool, work, *args)


def _parts(spooled: SpooledFrame, offset: int) -> list[tuple[bytes, int]]:
    """The next two chunks from `offset`, ready to be sent, with their sizes."""
    stop = min(offset + 2 * CHUNK_BYTES, spooled.nbytes)
    parts = []
    for start in range(offset, stop, CHUNK_BYTES):
        wanted = min(CHUNK_BYTES, stop - start)
        data = spooled.read(start, wanted)
        if len(data) < wanted:
            raise StoreError(
                f"{str(spooled.path)!r} ends at byte {start + len(data)} of {spooled.nbytes}; "
                f"restart the coordinator, which computes it again"
            )
        parts.append((chunks.data_part(data), wanted))
    return parts


def _set_soon(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Sets `event` from any thread; a loop that has ended has nobody who waits."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(event.set)


def _opening(part: transfer_pb2.UploadPart) -> UploadRequest:
    if part.WhichOneof("part") != "open":
        raise FrameError("an upload begins with `open`; send the header first")
    return _upload_request(part.open)


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
            generation=message.generation,
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


def handlers(service: TransferService) -> grpc.GenericRpcHandler:
    """The data plane's methods, ready to be served."""
    return rpc.handlers(_SERVICE, service)


def methods() -> Iterable[str]:
    """Every method of the data plane, from the service's own description."""
    return [f"/{_SERVICE.full_name}/{method.name}" for method in _SERVICE.methods]
