"""Weights out of the parts of a checkpoint, piece by piece: nobody holds them whole.

part of rank r = [weights | first moments | second moments], each its shard of every unit, in
the order of the units, as little-endian fp32
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from atoll.blobs.base import Blobs
from atoll.errors import StateDamaged
from atoll.layout import ELEMENT_BYTES, Layout
from atoll.ledger.records import CheckpointRecord
from atoll.strategies.sharded.strategy import Sharded
from atoll.sums.digest import ParamsDigest, StreamedDigest

PIECE_BYTES = 1 << 20


def weights_of(
    blobs: Blobs, names: Sequence[str], strategy: Sharded, layout: Layout
) -> Iterator[memoryview]:
    """The bytes of the weights in layout order, from the blobs of all ranks, by rank.

    A piece is valid until the next one is asked for. StateDamaged for a blob of another size.
    """
    size = len(names)
    with ExitStack() as stack:
        readers = [stack.enter_context(blobs.open(name)) for name in names]
        for rank, reader in enumerate(readers):
            right = strategy.save_bytes(layout, rank, size)
            if reader.nbytes != right:
                raise StateDamaged(
                    f"blob {names[rank]} of rank {rank} of {size} has {reader.nbytes} bytes; its "
                    f"part of a checkpoint has {right}; restore the state directory from a copy"
                )
        shards = [strategy.shard(layout, rank, size) for rank in range(size)]
        reached = [0] * size
        buffer = memoryview(bytearray(PIECE_BYTES))
        for unit in zip(*shards, strict=True):
            for rank, span in enumerate(unit):
                left = len(span) * ELEMENT_BYTES
                while left:
                    piece = buffer[: min(left, PIECE_BYTES)]
                    readers[rank].read_into(reached[rank], piece)
                    reached[rank] += len(piece)
                    left -= len(piece)
                    yield piece


def digest_of(
    blobs: Blobs, names: Sequence[str], strategy: Sharded, layout: Layout
) -> ParamsDigest:
    """The params digest of a checkpoint's weights."""
    found = StreamedDigest(layout)
    for piece in weights_of(blobs, names, strategy, layout):
        found.feed(piece)
    return found.finish()


def blobs_of(checkpoints: Sequence[CheckpointRecord]) -> set[str]:
    """The blobs that these checkpoints consist of."""
    return {blob for checkpoint in checkpoints for blob in checkpoint.blobs}
