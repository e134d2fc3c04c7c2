"""Late joiners: machines that catch up on several ranks, and buckets that count and break."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from atoll.blobs.bucket import Bucket, Tag
from atoll.blobs.memory_bucket import MemoryBucket
from atoll.collectives.base import Collectives
from atoll.errors import AtollError
from atoll.gather import catch_up
from atoll.gather.archive import Archive
from atoll.gather.catch_up import CatchUp
from atoll.gather.rebuild import Trust
from atoll.gather.replica import Replica
from atoll.optim.sgd import Sgd
from tests import gather_windows as windows
from tests import gathers, rank_groups
from tests.gather_windows import LAYOUT

PIECE_BYTES = 1_000
STRETCH_BYTES = 5_000


@dataclass
class Late:
    """What a machine has saved: the weights after its last window."""

    home: Path
    master: Tensor = field(default_factory=gathers.start)
    window: int = 0
    prev: str = "0" * 64
    replicas: dict[int, Replica] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        return windows.root(self.master)

    def run(
        self,
        archive_of: Callable[[int], Archive],
        *,
        size: int = 1,
        lr: float = gathers.LR,
        trust: Trust | None = None,
        memory_bytes: int = 64 << 20,
    ) -> list[Any]:
        """What each rank got or raised; only what was applied is saved."""
        start = self.master.clone()
        at = {"window": self.window, "digest": self.digest, "prev": self.prev}
        owners = catch_up.owners(LAYOUT, size)

        def work(ranks: Collectives) -> Any:
            own = owners[ranks.rank]
            replica = Replica(master=own.of(start), **at)  # type: ignore[arg-type]
            self.replicas[ranks.rank] = replica

            def applied(moved: Replica) -> None:
                own.of(self.master).copy_(moved.master)
                self.window, self.prev = moved.window, moved.prev

            by = CatchUp(
                ranks=ranks,
                archive=archive_of(ranks.rank),
                optimizer=Sgd(lr),
                trust=windows.terms().trust if trust is None else trust,
                memory_bytes=memory_bytes,
                directory=self.home / "late",
                stretch_bytes=STRETCH_BYTES,
            )
            try:
                return by.run(replica, applied=applied)
            except AtollError as exc:
                return exc

        return rank_groups.threads(size, "direct", work, chunk_bytes=1 << 16)


def caught_up(late: Late, bucket: Bucket, **changes: Any) -> Any:
    """What all ranks got; what they raise is raised."""
    found = late.run(lambda _: windows.archive(bucket), **changes)
    assert all(one == found[0] or isinstance(one, Exception) for one in found), found
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def copied(bucket: Bucket) -> MemoryBucket:
    """The same objects in a bucket of their own."""
    made = MemoryBucket(windows.CLOCK)
    for prefix in ("archive", "peers"):
        for key in bucket.keys(prefix):
            made.put(key, content(bucket, key))
    return made


def content(bucket: Bucket, key: str) -> bytes:
    until = windows.CLOCK.now() + 30
    tag = bucket.look(key, deadline=until)
    assert tag is not None, key
    return b"".join(bytes(p) for p in bucket.pieces(key, tag, 0, tag.nbytes, deadline=until))


class Counted:
    """A bucket that hands out small pieces, counts those of bodies, and may break before one."""

    def __init__(
        self, bucket: Bucket, breaks: Callable[[int], Exception | None] = lambda _: None
    ) -> None:
        self._bucket, self._breaks = bucket, breaks
        self.body_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bucket, name)

    def pieces(
        self, key: str, tag: Tag, start: int, stop: int, *, deadline: float
    ) -> Iterator[memoryview]:
        for begin in range(start, stop, PIECE_BYTES):
            end = min(stop, begin + PIECE_BYTES)
            if "/bodies/" in key and (error := self._breaks(self.body_bytes)) is not None:
                raise error
            for piece in self._bucket.pieces(key, tag, begin, end, deadline=deadline):
                self.body_bytes += len(piece) if "/bodies/" in key else 0
                yield piece
