"""From old weights to the newest, by the artifacts of the windows between, to the same bits.

Records are read and checked first, all of them: signatures, chain, gaps. Then bodies, the next one
fetched while one is applied; a piece of memory each, for they lie on disk. Whole weights are taken
instead where they are fewer bytes, or where records before them are gone.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from atoll import files
from atoll.collectives.base import Collectives
from atoll.errors import ConfigError, ObjectMissing, StateDamaged
from atoll.gather.archive import Archive, Recorded
from atoll.gather.budget import Budget
from atoll.gather.replay import replay
from atoll.gather.replica import Replica
from atoll.gather.supports import CODEC
from atoll.gather.turns import Turns
from atoll.gather.window import GROUP
from atoll.layout import byte_view
from atoll.optim.base import OuterOptimizer

MAX_GAPS = 100_000  # windows that a record may be ahead; each is a request


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
class Link:
    """What is kept in memory of a record; it lies on disk."""

    window: int
    sha256: str
    prev: str
    base_digest: str
    digest: str
    body_bytes: int


@dataclass(frozen=True, kw_only=True)
class CatchUp:
    """What one process catches up with; `ranks` is a group of itself alone."""

    ranks: Collectives
    archive: Archive
    optimizer: OuterOptimizer
    memory_bytes: int
    directory: Path  # for records and bodies under way

    def __post_init__(self) -> None:
        if self.ranks.size != 1:
            raise ConfigError(f"a catch-up is of one rank; this group has {self.ranks.size}")

    def run(self, replica: Replica, *, stop: int | None = None) -> Caught:
        """Moves `replica` to window `stop`, or behind the newest record.

        ObjectMissing names the first window without a record that cannot be done without;
        StateDamaged and FrameError what does not hold. The replica then stands where the last good
        window left it, or is torn.
        """
        first = replica.window
        replica.check(first)
        files.make_directories(self.directory)
        links, gaps = self._links(first, stop)
        whole = cheapest(
            links,
            gaps,
            whole_bytes=self.archive.layout.nbytes,
            is_there=lambda link: self.archive.has_weights(link.digest),
        )
        start = first if whole is None else whole.window + 1
        missing = [window for window in gaps if window >= start]
        if missing:
            raise ObjectMissing(
                f"window {missing[0]} has no record, so the windows from {start} on cannot be "
                f"applied; restore it, or start from weights after window {missing[0]}"
            )
        _check_chain([link for link in links if link.window >= start])
        if not gaps and links:
            _check_chain(links)
        nbytes = 0
        if whole is not None:
            self._take(replica, whole)
            nbytes = self.archive.layout.nbytes
        left = [link for link in links if link.window >= start]
        for found, body in self._bodies(left):
            self._apply(replica, found, body)
            nbytes += found.artifact.body_bytes
        shutil.rmtree(self.directory)
        return Caught(
            first=first,
            stop=replica.window,
            weights_after=None if whole is None else whole.window,
            applied=len(left),
            bytes=nbytes,
            digest=replica.digest,
        )

    def _links(self, first: int, stop: int | None) -> tuple[list[Link], list[int]]:
        """The records from `first` on, checked and put on disk, and the windows that lack one."""
        known = [window for window in self.archive.windows() if window >= first]
        end = stop if stop is not None else max(known, default=first - 1) + 1
        lacking = end - first - sum(window < end for window in known)
        if lacking > MAX_GAPS:
            raise ObjectMissing(
                f"windows {first} to {end - 1} have records but for {lacking} of them, more than "
                f"can be missing ({MAX_GAPS}); see who writes to the archive"
            )
        links, gaps = [], []
        for window in range(first, end):
            document = self.archive.document(window)
            if document is None:
                gaps.append(window)
                continue
            found = self.archive.read(document, window)
            path = self._record(window)
            with files.naming("write a record to", path):
                path.write_bytes(document)
            made = found.artifact
            digests = (made.prev, made.base_digest, made.digest)
            links.append(Link(window, found.sha256, *digests, made.body_bytes))
        return links, gaps

    def _take(self, replica: Replica, link: Link) -> None:
        path = self.directory / "weights"
        self.archive.fetch_weights(link.digest, path)
        fd = files.SYSTEM.open(path)
        try:
            replica.is_torn = True
            files.read_into(fd, 0, byte_view(replica.master), path=path)
        finally:
            files.SYSTEM.close(fd)
            path.unlink()
        replica.window = link.window
        replica.advance(link.digest, link.sha256)

    def _bodies(self, links: list[Link]) -> Iterator[tuple[Recorded, Path]]:
        """Each record with its body, the next one on its way."""
        if not links:
            return
        with ThreadPoolExecutor(1, thread_name_prefix="catch-up") as pool:
            coming: Future[tuple[Recorded, Path]] | None = pool.submit(self._fetched, links[0])
            for link, after in zip(links, [*links[1:], None], strict=True):
                assert coming is not None, link
                found = coming.result()
                coming = None if after is None else pool.submit(self._fetched, after)
                yield found

    def _fetched(self, link: Link) -> tuple[Recorded, Path]:
        record, body = self._record(link.window), self.directory / f"{link.window:08d}.body"
        with files.naming("read", record):
            found = self.archive.read(record.read_bytes(), link.window)
        if found.sha256 != link.sha256:
            raise StateDamaged(f"{str(record)!r} changed since it was written; check the disk")
        self.archive.fetch(found.artifact, body)
        return found, body

    def _apply(self, replica: Replica, found: Recorded, body: Path) -> None:
        made, layout = found.artifact, self.archive.layout
        budget = Budget.of(
            self.memory_bytes, peers=len(made.accepted), ranks=1, layout=layout, codec=CODEC
        )
        turns = Turns(GROUP, made.window)
        replay(
            self.ranks,
            turns,
            replica,
            found,
            body=body,
            layout=layout,
            budget=budget,
            optimizer=self.optimizer,
        )
        body.unlink()

    def _record(self, window: int) -> Path:
        return self.directory / f"{window:08d}.json"


def cheapest(
    links: Sequence[Link],
    gaps: Sequence[int],
    *,
    whole_bytes: int,
    is_there: Callable[[Link], bool],
) -> Link | None:
    """The window whose whole weights to take: where they save bytes, or lie behind a gap.

    The newest that are there leave the fewest bodies, so no older ones are looked at.
    """
    bodies = sum(link.body_bytes for link in links)
    if not gaps and bodies <= whole_bytes:
        return None
    for link in reversed(links):
        if gaps and link.window < gaps[-1]:
            return None
        if is_there(link):
            after = sum(one.body_bytes for one in links if one.window > link.window)
            return link if gaps or whole_bytes + after < bodies else None
    return None


def _check_chain(links: list[Link]) -> None:
    """StateDamaged unless each record names the one before it, and its weights."""
    for before, link in pairwise(links):
        if (link.prev, link.base_digest) != (before.sha256, before.digest):
            raise StateDamaged(
                f"the record of window {link.window} does not follow that of window "
                f"{before.window}; the archive holds two chains, see who writes to it"
            )
