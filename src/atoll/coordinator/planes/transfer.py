"""The data plane: gRPC methods that move chunks between islands and the coordinator.

Hashing, decoding and disk run in worker threads, so the event loop keeps answering heartbeats.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from atoll.coordinator import handlers
from atoll.coordinator.accept.admission import UploadRequest
from atoll.coordinator.authority import Authority
from atoll.coordinator.members.presence import Stream
from atoll.coordinator.planes import part_transfer, sent
from atoll.coordinator.rounds.spool import SpooledFrame
from atoll.coordinator.service import Coordinator
from atoll.coordinator.sharded.service import ShardedCoordinator
from atoll.errors import FrameError, StoreError
from atoll.ledger.records import ContributionRecord
from atoll.wire import chunks, rpc, schema
from atoll.wire.proto import transfer_pb2

T = TypeVar("T")

MAX_MESSAGE_BYTES = 2 << 20  # one chunk and room; a stranger makes the server hold no more
SERVICE = transfer_pb2.DESCRIPTOR.services_by_name["Transfer"]
NO_PART = transfer_pb2.UploadPart()
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

    def __init__(self, coordinator: Authority, pool: ThreadPoolExecutor) -> None:
        self._coordinator = coordinator
        self._pool = pool

    async def Offset(
        self, request: transfer_pb2.UploadOpen | None, context: "Context"
    ) -> transfer_pb2.UploadOffset:
        async with rpc.answering(context):
            coordinator = self._of_rounds("Offset")
            with coordinator.refusals():
                opened = _upload_request(rpc.readable(request))
            offset = await self._run(coordinator.upload_offset, opened)
        return transfer_pb2.UploadOffset(offset=offset)

    async def Upload(
        self, parts: AsyncIterator["Part"], context: "Context"
    ) -> transfer_pb2.Receipt:
        async with rpc.answering(context):
            record = await self._receive(parts)
        return transfer_pb2.Receipt(
            round=record.round,
            worker_id=record.worker_id,
            sha256=record.sha256,
            receipt=record.receipt,
        )

    async def _receive(self, parts: AsyncIterator["Part"]) -> ContributionRecord:
        coordinator = self._of_rounds("Upload")
        first = await anext(parts, NO_PART)
        with coordinator.refusals():
            opened = _opening(NO_PART if isinstance(first, memoryview) else rpc.readable(first))
        stream = await self._run(coordinator.begin_upload, opened)
        if isinstance(stream, ContributionRecord):
            return stream
        writing: Awaitable[None] | None = None
        async for part in parts:
            # One chunk is hashed and written while the next one comes in.
            if writing is not None:
                await writing
            if isinstance(part, memoryview):
                writing = self._run(coordinator.write_upload, stream, part)
                continue
            told = rpc.readable(part)
            sent.check_commit(told.WhichOneof("part"), told.commit, of="an upload")
            await sent.check_end(parts, of="an upload")
            return await self._run(coordinator.commit_upload, stream)
        if writing is not None:
            await writing
        raise FrameError(
            f"the upload ended without `commit` after {stream.upload.offset} bytes; resume there"
        )

    async def Download(
        self, asked: transfer_pb2.DownloadRequest | None, context: "Context"
    ) -> AsyncIterator[transfer_pb2.DownloadPart | bytes]:
        async with rpc.answering(context):
            coordinator = self._of_rounds("Download")
            with coordinator.refusals():
                request = rpc.readable(asked)
                identity = sent.identity(request.identity)
            wanted = {"round_number": request.round, "have_digest": request.have_digest}
            spooled = await self._run(coordinator.download, identity, **wanted)
            resumes = request.tag == spooled.tag and request.offset <= spooled.nbytes
            offset = request.offset if resumes else 0
            opened = transfer_pb2.DownloadOpen(
                tag=spooled.tag, nbytes=spooled.nbytes, offset=offset, version=spooled.header.round
            )
            yield transfer_pb2.DownloadPart(open=opened)
            while offset < spooled.nbytes:
                for part, nbytes in await self._run(_parts, spooled, offset):
                    yield part
                    offset += nbytes
                    self._coordinator.sent(identity, nbytes)

    async def PartOffset(
        self, request: transfer_pb2.PartOpen | None, context: "Context"
    ) -> transfer_pb2.UploadOffset:
        async with rpc.answering(context):
            coordinator = self._of_steps("PartOffset")
            found = await part_transfer.offset(coordinator, request, self._run)
        return transfer_pb2.UploadOffset(offset=found)

    async def SendPart(
        self, pieces: AsyncIterator["part_transfer.Piece"], context: "Context"
    ) -> transfer_pb2.PartReceipt:
        async with rpc.answering(context):
            coordinator = self._of_steps("SendPart")
            sha256 = await part_transfer.receive(coordinator, pieces, self._run)
        return transfer_pb2.PartReceipt(sha256=sha256)

    async def Fetch(
        self, asked: transfer_pb2.FetchRequest | None, context: "Context"
    ) -> AsyncIterator[bytes]:
        async with rpc.answering(context):
            coordinator = self._of_steps("Fetch")
            async for part in part_transfer.fetch(coordinator, asked, self._run, self._run):
                yield part

    async def Presence(
        self, asked: transfer_pb2.PresenceOpen | None, context: "Context"
    ) -> AsyncIterator[transfer_pb2.PresenceState]:
        async with rpc.answering(context):
            with self._coordinator.refusals():
                identity = sent.identity(rpc.readable(asked).identity)
            ended = asyncio.Event()
            close = partial(_set_soon, asyncio.get_running_loop(), ended)
            attending = self._run(self._coordinator.attend, identity, close=close)
            opening = asyncio.ensure_future(attending)
            try:
                # Shielded: a caller who is gone by now must be found lost, not kept as present.
                await asyncio.shield(opening)
                yield transfer_pb2.PresenceState(generation=identity.generation)
                await ended.wait()
            finally:
                opening.add_done_callback(self._lost)

    def _of_rounds(self, method: str) -> Coordinator:
        """The coordinator of a run in rounds; ProtocolError names the method for any other."""
        with self._coordinator.refusals():
            return handlers.check_kind(self._coordinator, Coordinator, method)

    def _of_steps(self, method: str) -> ShardedCoordinator:
        """The coordinator of a sharded run; ProtocolError names the method for any other."""
        with self._coordinator.refusals():
            return handlers.check_kind(self._coordinator, ShardedCoordinator, method)

    def _lost(self, opening: "asyncio.Future[Stream]") -> None:
        if not opening.cancelled() and opening.exception() is None:
            self._coordinator.absent(opening.result())

    def _run(self, work: Callable[..., T], *args: Any, **named: Any) -> Awaitable[T]:
        """Starts `work` in a thread at once."""
        task = partial(work, *args, **named)
        return asyncio.get_running_loop().run_in_executor(self._pool, task)


def _parts(spooled: SpooledFrame, offset: int) -> list[tuple[bytes, int]]:
    """The next two chunks from `offset`, ready to be sent, with their sizes."""
    stop = min(offset + 2 * chunks.CHUNK_BYTES, spooled.nbytes)
    parts = []
    for start in range(offset, stop, chunks.CHUNK_BYTES):
        wanted = min(chunks.CHUNK_BYTES, stop - start)
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


def _upload_request(told: transfer_pb2.UploadOpen) -> UploadRequest:
    if not schema.SHA256.holds(told.sha256):
        raise FrameError(
            f"sha256={told.sha256[:80]!r} must be {schema.SHA256.text}: the name of the whole frame"
        )
    identity = sent.identity(told.identity)
    return UploadRequest(identity, told.preamble, told.sha256, told.nbytes, told.offset)
