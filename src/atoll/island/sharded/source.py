"""What a rank lets the others of its group read: shards of its saves, and their hashes.

    own/GROUP/STEP          this rank's shard of a save that is being made
    root/SHA256             any shard of a complete pair, by its root

each with `.chunks` at the end for the hashes of its chunks.
"""

import threading
from collections.abc import Iterator

from atoll.errors import BlobChanged, BlobMissing, NotReady
from atoll.strategies.sharded.saves import Chunks, Saves, StoredShard

CHUNKS = ".chunks"


def own_name(group: int, step: int) -> str:
    """The name of a rank's own shard while its successor fetches it."""
    return f"own/{group}/{step}"


def root_name(root: str) -> str:
    """The name of a shard by its root."""
    return f"root/{root}"


class SaveSource:
    """Fulfils `collectives.peers.Source`. Checks every chunk that it gives, and drops a bad save.

    Asked for its own shard of a step that it has not saved yet, it asks to be called again.
    """

    def __init__(self, saves: Saves) -> None:
        self._saves = saves
        self._lock = threading.Lock()
        self._own: dict[str, tuple[StoredShard, Chunks]] = {}

    def offer(self, group: int, step: int, shard: StoredShard, chunks: Chunks) -> None:
        """The shard is on the disk: the next rank may fetch it. Earlier ones need not stay."""
        with self._lock:
            while len(self._own) > 1:  # the next rank may be one save behind
                del self._own[next(iter(self._own))]
            self._own[own_name(group, step)] = shard, chunks

    def read(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        wanted = name.removesuffix(CHUNKS)
        shard, chunks = self._found(wanted)
        if name.endswith(CHUNKS):
            yield chunks.encoded()[start:stop]
            return
        try:
            for piece in chunks.read(shard.read, start, min(stop, chunks.nbytes)):
                yield bytes(piece)
        except BlobChanged:
            self._saves.discard(chunks.root)
            raise

    def _found(self, name: str) -> tuple[StoredShard, Chunks]:
        kind, _, rest = name.partition("/")
        if kind == "root":
            shard = self._saves.find(rest)
            return shard, shard.chunks()
        if kind != "own":
            raise BlobMissing(f"name={name[:80]!r} is nothing that a rank lets others read")
        with self._lock:
            found = self._own.get(name)
        if found is None:
            raise NotReady(f"{name[:80]!r} is not saved yet; call again")
        return found
