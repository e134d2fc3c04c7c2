"""The data plane of a sharded run: parts of checkpoints come in, ranges of blobs go out."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from atoll.blobs.base import BlobReader
from atoll.coordinator.planes import sent
from atoll.coordinator.sharded.part_uploads import PartRequest
from atoll.coordinator.sharded.service import ShardedCoordinator
from atoll.errors import FrameError
from atoll.wire import chunks, rpc, schema
from atoll.wire.proto import transfer_pb2

T = TypeVar("T")
NO_PIECE = transfer_pb2.PartPiece()
if TYPE_CHECKING:
    Piece = transfer_pb2.PartPiece | memoryview | None  # a view: data alone; None: no message

Run = Callable[..., Awaitable[T]]  # in a thread


async def offset(
    coordinator: ShardedCoordinator, request: transfer_pb2.PartOpen | None, run: "Run[int]"
) -> int:
    """Where an upload resumes."""
    with coordinator.refusals():
        opened = _part_request(rpc.readable(request))
    return await run(coordinator.part_offset, opened)


async def receive(
    coordinator: ShardedCoordinator, pieces: AsyncIterator["Piece"], run: "Run[object]"
) -> str:
    """Takes a part in; its sha256 once it is durable."""
    first = await anext(pieces, NO_PIECE)
    with coordinator.refusals():
        opened = _opening(NO_PIECE if isinstance(first, memoryview) else rpc.readable(first))
    stream = await run(coordinator.begin_part, opened)
    if stream is None:
        return opened.sha256
    writing: Awaitable[object] | None = None
    async for piece in pieces:
        # One chunk is hashed and written while the next one comes in.
        if writing is not None:
            await writing
        if isinstance(piece, memoryview):
            writing = run(coordinator.write_part, stream, piece)
            continue
        told = rpc.readable(piece)
        sent.check_commit(told.WhichOneof("piece"), told.commit, of="a part")
        await sent.check_end(pieces, of="a part")
        await run(coordinator.commit_part, stream)
        return opened.sha256
    if writing is not None:
        await writing
    raise FrameError("the part ended without `commit`; ask for the offset and resume there")


async def fetch(
    coordinator: ShardedCoordinator,
    asked: transfer_pb2.FetchRequest | None,
    run: "Run[BlobReader]",
    read: "Run[bytes]",
) -> AsyncIterator[bytes]:
    """The bytes that were asked for, chunk by chunk, ready to be sent."""
    with coordinator.refusals():
        request = rpc.readable(asked)
        identity = sent.identity(request.identity)
    place, stop = request.offset, request.offset + request.nbytes
    reader = await run(coordinator.fetch, identity, request.sha256, place, request.nbytes)
    with reader:
        while place < stop:
            data = await read(reader.read, place, min(chunks.CHUNK_BYTES, stop - place))
            yield chunks.data_part(data)
            place += len(data)
            coordinator.sent(identity, len(data))


def _opening(piece: transfer_pb2.PartPiece) -> PartRequest:
    if piece.WhichOneof("piece") != "open":
        raise FrameError("a part begins with `open`; say first what it is")
    return _part_request(piece.open)


def _part_request(told: transfer_pb2.PartOpen) -> PartRequest:
    if not schema.SHA256.holds(told.sha256):
        raise FrameError(
            f"sha256={told.sha256[:80]!r} must be {schema.SHA256.text}: the name of the whole part"
        )
    return PartRequest(
        sent.identity(told.identity),
        told.group,
        told.round,
        told.sha256,
        told.nbytes,
        told.offset,
    )
