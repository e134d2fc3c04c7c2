"""A rank's shard from wherever the group goes back to: saves of ranks, a checkpoint, or the start.

Only the ranges that this rank owns are read, and what comes from other ranks is checked against the
hashes that the coordinator recorded.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from atoll.collectives.peers import Peers
from atoll.errors import BlobChanged, BlobMissing, MissingRanks
from atoll.island.link.rank import RankLink
from atoll.island.sharded import source
from atoll.island.sharded.talk import Talk
from atoll.layout import ELEMENT_BYTES
from atoll.protocol.messages import Identity
from atoll.protocol.sharded import Restore
from atoll.strategies.sharded import reshard, saves
from atoll.strategies.sharded.holding import SECTIONS, Holding, holdings
from atoll.strategies.sharded.reshard import Read
from atoll.strategies.sharded.saves import Chunks, Saves

log = logging.getLogger(__name__)

ZERO_BYTES = 1 << 20
FETCH_BYTES = 8 << 20  # of one call to the coordinator, so that a broken one repeats little

# (section, first element, bytes of whole elements)
Put = Callable[[int, int, bytes | memoryview], None]


def restore(
    wanted: Restore, new: Holding, put: Put, *, peers: Peers, talk: Talk, kept: Saves
) -> None:
    """Hands every element of the new shard to `put`, once."""
    if wanted.source == "initial":
        _from_start(wanted, new, put, talk)
    elif wanted.source == "checkpoint":
        _from_checkpoint(wanted, new, put, talk)
    else:
        _from_saves(wanted, new, put, peers, kept)
    about = {"step": wanted.step, "source": wanted.source, "size": wanted.size}
    log.info("restored", extra=about)


def _from_start(wanted: Restore, new: Holding, put: Put, talk: Talk) -> None:
    for span, place in reshard.flat_reads(new):
        start = wanted.offset + span.start * ELEMENT_BYTES
        stop = wanted.offset + span.stop * ELEMENT_BYTES
        _put_all(put, 0, place, _fetched(talk, wanted.parts[0], start, stop))
    for section in range(1, len(SECTIONS)):
        _put_all(put, section, 0, _zeros(new.elements * ELEMENT_BYTES))


def _from_checkpoint(wanted: Restore, new: Holding, put: Put, talk: Talk) -> None:
    olds = holdings(new.units, wanted.size)
    for read in reshard.reads(new, wanted.size):
        start, stop = read.byte_range(olds[read.part])
        data = _fetched(talk, wanted.parts[read.part], wanted.offset + start, wanted.offset + stop)
        _put_all(put, read.section, read.place, data)


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
    found = Chunks.decoded(encoded, nbytes=nbytes)
    found.check_root(root)
    return found


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
