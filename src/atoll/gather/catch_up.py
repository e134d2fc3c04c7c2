"""From old weights to the newest, by the artifacts of the windows between, to the same bits.

Records first, read by one rank: signatures, chain, gaps. Then bodies, of which each rank fetches
its stretches, those of the next one while one is applied. A catch-up that broke off, or was killed,
goes on behind the bytes that it has. Whole weights are taken instead where they are fewer bytes, or
where records before them are gone.
"""

import json
import logging
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from atoll import canonical, files
from atoll.blobs.bucket import PIECE_BYTES
from atoll.collectives.base import Collectives
from atoll.errors import ConfigError, FrameError
from atoll.gather import leaves, plan
from atoll.gather.archive import Archive, Recorded
from atoll.gather.budget import Budget
from atoll.gather.download import STRETCH_BYTES, Download
from atoll.gather.links import Link, Records, Way
from atoll.gather.rebuild import Trust
from atoll.gather.replay import Replay
from atoll.gather.replica import Replica
from atoll.gather.supports import CODEC
from atoll.gather.turns import Turns
from atoll.gather.vote import agree, on_all
from atoll.layout import ELEMENT_BYTES, GROUP_ELEMENTS, Layout, Span, byte_view
from atoll.optim.base import OuterOptimizer

log = logging.getLogger(__name__)

GROUP = 1  # of the collectives' keys, as for windows: a group does one or the other
READER = 0  # the rank that reads records
LIMIT_BYTES = 8 << 20  # of a way: some 20,000 windows
# On its way while a window is applied: a piece, the same inside a client, and being written.
_AHEAD_BYTES = 3 * PIECE_BYTES
T = TypeVar("T")


def owners(layout: Layout, ranks: int) -> list[Span]:
    """The part of the model that each rank holds: runs of groups, whatever the memory budget."""
    return plan.owners(layout, ranks, GROUP_ELEMENTS * ELEMENT_BYTES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Caught:
    """What a catch-up did."""

    first: int  # the window that came next before it
    stop: int  # the one that comes next now
    weights_after: int | None  # the window whose whole weights were taken
    applied: int  # windows
    bytes: int  # of bodies and weights
    digest: str


@dataclass(frozen=True, slots=True)
class _Coming:
    """A window whose body is being fetched."""

    found: Recorded
    body: Download
    is_resumed: bool  # whether an earlier life has fetched some of it, on any rank
    done: Future[None]


@dataclass(frozen=True, kw_only=True)
class CatchUp:
    """What one rank catches up with."""

    ranks: Collectives
    archive: Archive
    optimizer: OuterOptimizer
    trust: Trust
    memory_bytes: int
    directory: Path  # all ranks', for records and bodies under way
    stretch_bytes: int = STRETCH_BYTES  # of an object, by one rank; the ranks take turns

    def run(
        self,
        replica: Replica,
        *,
        stop: int | None = None,
        applied: Callable[[Replica], None] = lambda _: None,
    ) -> Caught:
        """Moves `replica`, of this rank's `owners`, to window `stop`, or behind the newest record.

        All ranks call it and raise the same error. ConfigError for a `stop` that lies behind;
        ObjectMissing names the first window without a
        record that cannot be done without; StateDamaged and FrameError what does not hold. The
        replica then stands where the last good window left it, or is torn. `applied` is called on
        every rank after each window: what it saves, a catch-up that is killed need not do again.
        """
        first, turns = replica.window, Turns(GROUP, 0)
        self._agree(turns, replica, stop)
        way = self._way(turns, first, stop)
        nbytes = 0
        if way.whole is not None:
            self._take(turns, replica, way.whole)
            applied(replica)
            nbytes += self.archive.layout.nbytes
        for coming in self._bodies(turns, way.links):
            self._apply(turns, replica, coming)
            applied(replica)
            nbytes += coming.body.nbytes
            self._removed(turns, coming.body)
        clear = partial(shutil.rmtree, self.directory, ignore_errors=True)
        self._on_all(turns, clear if self._is_reader else _nothing)
        return Caught(
            first=first,
            stop=replica.window,
            weights_after=None if way.whole is None else way.whole.window,
            applied=len(way.links),
            bytes=nbytes,
            digest=replica.digest,
        )

    # The way

    def _agree(self, turns: Turns, replica: Replica, stop: int | None) -> None:
        """All ranks can begin, from the same weights."""

        def ready() -> None:
            replica.check(replica.window)
            if stop is not None and stop < replica.window:
                raise ConfigError(
                    f"--stop {stop} lies before window {replica.window}, which the weights wait "
                    f"for; nothing goes back, so start from older weights in another state"
                )
            own = owners(self.archive.layout, self.ranks.size)[self.ranks.rank]
            assert replica.master.shape == (len(own),), (replica.master.shape, own)
            files.make_directories(self.directory)

        self._on_all(turns, ready)
        told = [replica.window, replica.digest, replica.prev, stop, self.archive.manifest_sha256]
        plan.agree(self.ranks, turns.next("control"), canonical.sha256(told))

    def _way(self, turns: Turns, first: int, stop: int | None) -> Way:
        """Found by one rank, the same on all."""

        def read() -> bytes:
            if not self._is_reader:
                return b""
            return canonical.dumps(asdict(self._records.way(first, stop))).encode()

        document = self._on_all(turns, read)
        said = self.ranks.all_gather_bytes(turns.next("control"), document, limit=LIMIT_BYTES)
        found: dict[str, Any] = json.loads(said[READER])  # of this very program on another rank
        whole = found["whole"]
        links = tuple(Link(**link) for link in found["links"])
        return Way(None if whole is None else Link(**whole), links)

    # Whole weights

    def _take(self, turns: Turns, replica: Replica, link: Link) -> None:
        """Each rank fetches its stretches and reads its own part; all compare the digest."""
        layout = self.archive.layout
        own = owners(layout, self.ranks.size)[self.ranks.rank]
        key = self.archive.weights_key(link.digest)
        weights = self._download(link.digest, key, layout.nbytes)
        while True:
            is_resumed = self._prepared(turns, weights)
            self._on_all(turns, partial(self._fetch, weights, threading.Event()))
            found = self._on_all(turns, partial(_part_of, weights.path, own))
            spans = owners(layout, self.ranks.size)
            root = leaves.params_digest(self.ranks, turns, layout, owners=spans, own=found).root
            self._removed(turns, weights)
            if root == link.digest:
                break
            if not is_resumed:  # nobody's disk has lost what is wrong here
                raise FrameError(f"{key!r} holds weights of another digest; nothing was taken")
        replica.master.copy_(found)
        replica.window = link.window
        replica.advance(link.digest, link.sha256)

    # Bodies

    def _bodies(self, turns: Turns, links: Sequence[Link]) -> Iterator[_Coming]:
        """Each record once its body is there, the next one on its way."""
        is_over = threading.Event()
        with ThreadPoolExecutor(1, thread_name_prefix="catch-up") as pool:
            try:
                ahead = [self._begun(turns, pool, links[0], is_over)] if links else []
                for place in range(len(links)):
                    coming = ahead.pop()
                    self._on_all(turns, coming.done.result)
                    if place + 1 < len(links):
                        ahead.append(self._begun(turns, pool, links[place + 1], is_over))
                    yield coming
            finally:
                is_over.set()

    def _begun(
        self, turns: Turns, pool: ThreadPoolExecutor, link: Link, is_over: threading.Event
    ) -> _Coming:
        """Checks a record, and begins to fetch its body."""

        def read() -> Recorded:
            found = self._records.read(link.window, link.sha256)
            self.trust.check_record(found.artifact, self.archive.layout)
            return found

        found = self._on_all(turns, read)
        made = found.artifact
        # Windows of nobody have equal bodies, and one is removed while the next is on its way.
        name = made.body_sha256 if made.body_bytes else f"{made.window:08d}.empty"
        body = self._download(name, self.archive.body_key(made), made.body_bytes)
        is_resumed = self._prepared(turns, body)
        return _Coming(found, body, is_resumed, pool.submit(self._fetch, body, is_over))

    def _apply(self, turns: Turns, replica: Replica, coming: _Coming) -> None:
        try:
            self._replay(turns, replica, coming)
        except FrameError:
            if not coming.is_resumed:
                raise
            # Bytes of an earlier life may have been lost by this disk: that says nothing yet.
            log.warning(
                "spooled body is fetched anew", extra={"window": coming.found.artifact.window}
            )
            self._removed(turns, coming.body)
            self._prepared(turns, coming.body)
            self._on_all(turns, partial(self._fetch, coming.body, threading.Event()))
            self._replay(turns, replica, coming)

    def _replay(self, turns: Turns, replica: Replica, coming: _Coming) -> None:
        layout, size = self.archive.layout, self.ranks.size
        made = coming.found.artifact
        by = Replay(
            layout=layout,
            owners=owners(layout, size),
            optimizer=self.optimizer,
            trust=self.trust,
            readers=range(size),
        )
        budget = Budget.of(
            self.memory_bytes - _AHEAD_BYTES,
            peers=len(made.accepted),
            ranks=size,
            layout=layout,
            codec=CODEC,
        )
        by.run(self.ranks, turns, replica, coming.found, body=coming.body.path, budget=budget)

    # One object, by all ranks

    def _download(self, name: str, key: str, nbytes: int) -> Download:
        return Download(self.directory / name, key, nbytes, self.stretch_bytes)

    def _prepared(self, turns: Turns, object: Download) -> bool:
        """Makes room for it; whether an earlier life has fetched some of it."""
        has_bytes = self._on_all(turns, object.prepare if self._is_reader else lambda: False)
        return not agree(self.ranks, turns.next("control"), not has_bytes)

    def _fetch(self, object: Download, is_over: threading.Event) -> None:
        object.fetch(
            self.archive,
            rank=self.ranks.rank,
            ranks=self.ranks.size,
            is_wanted=lambda: not is_over.is_set(),
        )

    def _removed(self, turns: Turns, object: Download) -> None:
        """Once all ranks are here, none of which needs it any more."""
        self._on_all(turns, _nothing)
        self._on_all(turns, object.discard if self._is_reader else _nothing)

    def _on_all(self, turns: Turns, work: Callable[[], T]) -> T:
        """`work` on every rank; what it raises on one reaches all."""
        return on_all(self.ranks, turns, work)

    @property
    def _is_reader(self) -> bool:
        return self.ranks.rank == READER

    @property
    def _records(self) -> Records:
        return Records(self.archive, self.directory)


def _part_of(path: Path, own: Span) -> Tensor:
    """A rank's part of whole weights in a file."""
    part = own.room()
    if len(own):
        fd = files.SYSTEM.open(path)
        try:
            files.read_into(fd, own.start * ELEMENT_BYTES, byte_view(part), path=path)
        finally:
            files.SYSTEM.close(fd)
    return part


def _nothing() -> None:
    """For ranks that only wait."""
