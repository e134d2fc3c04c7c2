"""A rank's shard from wherever the group goes back to: saves of ranks, a checkpoint, or the start.

Only the ranges that this rank owns are read, widened to what one hash is of, and all of it is
checked: chunks of saves and of a checkpoint's parts against the hash of the save that was recorded,
the initial weights against the digest in the manifest.
"""

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from atoll.collectives.peers import Peers
from atoll.errors import BlobChanged, BlobMissing, MissingRanks, ProtocolError
from atoll.island.link.rank import RankLink
from atoll.island.sharded import source
from atoll.island.sharded.talk import Talk
from atoll.layout import ELEMENT_BYTES, Layout, Span
from atoll.protocol.messages import Identity
from atoll.protocol.sharded import Restore
from atoll.strategies.sharded import reshard, saves
from atoll.strategies.sharded.holding import SECTIONS, Holding, holdings
from atoll.strategies.sharded.reshard import Read
from atoll.strategies.sharded.saves import Chunks, Saves
from atoll.sums import digest as digests

log = logging.getLogger(__name__)

ZERO_BYTES = 1 << 20
FETCH_BYTES = 8 << 20  # of one call to the coordinator, so that a broken one repeats little

# (section, first element, bytes of whole elements)
Put = Callable[[int, int, bytes | memoryview], None]


def restore(
    wanted: Restore,
    new: Holding,
    put: Put,
    *,
    peers: Peers,
    talk: Talk,
    kept: Saves,
    layout: Layout,
    initial_digest: str,
) -> None:
    """Hands every element of the new shard to `put`, once; BlobChanged where one is not right."""
    if wanted.source == "initial":
        _from_start(wanted, new, put, talk, layout, initial_digest)
    elif wanted.source == "checkpoint":
        _from_checkpoint(wanted, new, put, talk)
    else:
        _from_saves(wanted, new, put, peers, kept)
    about = {"step": wanted.step, "source": wanted.source, "size": wanted.size}
    log.info("restored", extra=about)


def _from_start(
    wanted: Restore, new: Holding, put: Put, talk: Talk, layout: Layout, digest: str
) -> None:
    def reader(start: int, stop: int) -> Iterator[bytes]:
        return _fetched(talk, wanted.parts[0], wanted.offset + start, wanted.offset + stop)

    nbytes = len(layout.leaves) * digests.LEAF_DIGEST_BYTES
    leaves = b"".join(_fetched(talk, digest, 0, nbytes))
    if digests.root_of(leaves) != digest:
        raise BlobChanged(
            f"the leaves that came for the initial weights make the digest "
            f"{digests.root_of(leaves)[:16]}; the manifest says {digest[:16]}, so restore the "
            f"coordinator's blob of them from a copy"
        )
    for span, place in reshard.flat_reads(new):
        _put_all(put, 0, place, _checked(layout, leaves, span, reader))
    for section in range(1, len(SECTIONS)):
        _put_all(put, section, 0, _zeros(new.elements * ELEMENT_BYTES))


def _from_checkpoint(wanted: Restore, new: Holding, put: Put, talk: Talk) -> None:
    if len(wanted.roots) != len(wanted.parts):
        raise ProtocolError(
            f"the checkpoint of step {wanted.step} has {len(wanted.parts)} parts and came with the "
            f"hashes of {len(wanted.roots)}; run the same release of atoll on both sides"
        )
    olds = holdings(new.units, wanted.size)
    hashes: dict[int, Chunks] = {}
    for read in reshard.reads(new, wanted.size):
        old, blob, root = olds[read.part], wanted.parts[read.part], wanted.roots[read.part]
        if read.part not in hashes:
            encoded = b"".join(_fetched(talk, root, 0, saves.encoded_bytes(old.nbytes)))
            hashes[read.part] = _decoded(encoded, root, old.nbytes)
        _put_checked(put, read, old, hashes[read.part], partial(_fetched, talk, blob))


def _from_saves(wanted: Restore, new: Holding, put: Put, peers: Peers, kept: Saves) -> None:
    olds = holdings(new.units, wanted.size)
    hashes: dict[int, Chunks] = {}
    for read in reshard.reads(new, wanted.size, wanted.holders):
        old, root = olds[read.part], wanted.parts[read.part]
        having = [read.holder, *(h for h in wanted.holders[read.part] if h != read.holder)]
        for holder in having:
            reader = _reader(holder, root, peers, kept, own=new.rank)
            try:
                if read.part not in hashes:
                    hashes[read.part] = _hashes(reader, root, old.nbytes)
                _put_checked(put, read, old, hashes[read.part], partial(reader, ""))
                break
            except (BlobChanged, BlobMissing, MissingRanks) as error:
                if holder == new.rank:
                    kept.discard(root)
                if holder == having[-1] or isinstance(error, MissingRanks):
                    raise
                about = {"part": read.part, "holder": holder, "reason": str(error)}
                log.warning("a save is read from another rank", extra=about)


def _reader(
    holder: int, root: str, peers: Peers, kept: Saves, *, own: int
) -> Callable[[str, int, int], Iterable[bytes]]:
    """Reads (suffix, start, stop) of a save: from this rank's own disk, or from another's."""
    if holder == own:

        def read(suffix: str, start: int, stop: int) -> Iterable[bytes]:
            shard = kept.find(root)
            return [shard.chunks().encoded()] if suffix else shard.read(start, stop)

        return read
    name = source.root_name(root)
    return lambda suffix, start, stop: peers.read(holder, name + suffix, start, stop)


def _hashes(reader: Callable[[str, int, int], Iterable[bytes]], root: str, nbytes: int) -> Chunks:
    encoded = b"".join(reader(source.CHUNKS, 0, saves.encoded_bytes(nbytes)))
    return _decoded(encoded, root, nbytes)


def _decoded(encoded: bytes, root: str, nbytes: int) -> Chunks:
    found = Chunks.decoded(encoded, nbytes=nbytes)
    found.check_root(root)
    return found


def _checked(layout: Layout, leaves: bytes, span: Span, reader: saves.Reader) -> Iterator[bytes]:
    """The bytes of a span of the initial weights, each from a leaf that was read whole."""
    spans = layout.leaves
    first = bisect_right(spans, span.start, key=lambda leaf: leaf.start) - 1
    stop = bisect_left(spans, span.stop, key=lambda leaf: leaf.start)
    rest = bytearray()
    pieces = iter(reader(spans[first].start * ELEMENT_BYTES, spans[stop - 1].stop * ELEMENT_BYTES))
    for number in range(first, stop):
        leaf = spans[number]
        nbytes = len(leaf) * ELEMENT_BYTES
        while len(rest) < nbytes:
            rest += next(pieces)
        data, rest = bytes(rest[:nbytes]), rest[nbytes:]
        digests.check_leaf(leaves, number, data)
        begin, end = max(leaf.start, span.start), min(leaf.stop, span.stop)
        yield data[(begin - leaf.start) * ELEMENT_BYTES : (end - leaf.start) * ELEMENT_BYTES]


def _put_checked(put: Put, read: Read, old: Holding, chunks: Chunks, reader: saves.Reader) -> None:
    _put_all(put, read.section, read.place, chunks.read(reader, *read.byte_range(old)))


def _put_all(put: Put, section: int, place: int, data: Iterable[bytes | memoryview]) -> None:
    """Hands over pieces of any size as whole elements."""
    rest = b""
    for piece in data:
        joined = rest + bytes(piece) if rest else piece
        whole = len(joined) // ELEMENT_BYTES * ELEMENT_BYTES
        put(section, place, memoryview(joined)[:whole])
        place += whole // ELEMENT_BYTES
        rest = bytes(joined[whole:])
    assert not rest, f"{len(rest)} bytes are left of a range of whole elements"


def _fetched(talk: Talk, sha256: str, start: int, stop: int) -> Iterator[bytes]:
    """A range of a blob of the coordinator's, piece by piece."""
    for first in range(start, stop, FETCH_BYTES):
        nbytes = min(FETCH_BYTES, stop - first)
        yield talk.carry(partial(_fetch, sha256=sha256, offset=first, nbytes=nbytes))


def _zeros(nbytes: int) -> Iterator[bytes]:
    for first in range(0, nbytes, ZERO_BYTES):
        yield bytes(min(ZERO_BYTES, nbytes - first))


def _fetch(link: RankLink, who: Identity, *, sha256: str, offset: int, nbytes: int) -> bytes:
    return link.fetch(who, sha256, offset=offset, nbytes=nbytes)
