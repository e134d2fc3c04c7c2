"""Hashes by which ranks check what they fetch: made from the blobs, known by what is recorded.

A part's are those of the chunks of its save, under the save's own hash; those of the initial
weights are the leaves of their params digest, under that digest. Whoever has the recorded name can
check the hashes, and with them every range, so nothing here needs to be believed.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from atoll.blobs.base import BlobReader, Blobs
from atoll.blobs.memory import MemoryReader
from atoll.layout import Layout
from atoll.strategies.sharded.saves import CHUNK_BYTES, Chunks
from atoll.sums.digest import StreamedDigest
from atoll.wire import frame

KEPT = 64  # of parts; some tens of kB for each GB of a part


@dataclass(eq=False)
class Hashes:
    """Reads a blob whole when its hashes are first asked for. Thread-safe."""

    blobs: Blobs
    layout: Layout
    _made: OrderedDict[str, bytes] = field(default_factory=OrderedDict)

    def of_part(self, root: str, blob: str) -> BlobReader:
        """The hashes of the chunks of a checkpoint's part, encoded as its saver encoded them."""
        return self._reader(root, lambda: self._chunks(blob))

    def of_initial(self, digest: str, blob: str) -> BlobReader:
        """The leaves of the initial weights' digest."""
        return self._reader(digest, lambda: self._leaves(blob))

    def _reader(self, name: str, make: Callable[[], bytes]) -> BlobReader:
        found = self._made.get(name)
        if found is None:
            found = self._made[name] = make()  # twice by two threads is no harm
            while len(self._made) > KEPT:
                self._made.popitem(last=False)
        return MemoryReader(name, found)

    def _chunks(self, blob: str) -> bytes:
        with self.blobs.open(blob) as reader:
            return Chunks.of(_pieces(reader, 0)).encoded()

    def _leaves(self, blob: str) -> bytes:
        found = StreamedDigest(self.layout)
        with self.blobs.open(blob) as reader:
            _, offset = frame.read_preamble(reader)
            for piece in _pieces(reader, offset, offset + self.layout.nbytes):
                found.feed(memoryview(piece))
        return found.finish().leaves


def _pieces(reader: BlobReader, start: int, stop: int | None = None) -> Iterator[bytes]:
    stop = reader.nbytes if stop is None else stop
    for first in range(start, stop, CHUNK_BYTES):
        yield reader.read(first, min(CHUNK_BYTES, stop - first))
