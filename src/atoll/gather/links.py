"""The records that a late joiner needs: read, checked and kept on disk; what they say in short.

Owns the chain, its gaps and where whole weights are the shorter way; applies nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from atoll import files
from atoll.errors import ObjectMissing, StateDamaged
from atoll.gather.archive import Archive, Recorded


@dataclass(frozen=True, slots=True)
class Link:
    """What is kept in memory of a record; it lies on disk."""

    window: int
    sha256: str
    prev: str
    base_digest: str
    digest: str
    body_bytes: int


@dataclass(frozen=True, slots=True)
class Way:
    """From a replica's weights to the newest: whole weights first or not, then windows."""

    whole: Link | None  # whose weights after it are taken
    links: tuple[Link, ...]  # applied one after another


@dataclass(frozen=True, slots=True)
class Records:
    """Records of an archive in a directory that all ranks of a machine share."""

    archive: Archive
    directory: Path

    def way(self, first: int, stop: int | None) -> Way:
        """The way from weights that wait for window `first` to those before `stop`, or the newest.

        ObjectMissing names the first window without a record that cannot be done without;
        StateDamaged where a record does not follow the one before.
        """
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
        check_chain(links if not gaps else [link for link in links if link.window >= start])
        return Way(whole, tuple(link for link in links if link.window >= start))

    def read(self, window: int, sha256: str) -> Recorded:
        """A record that `way` has put on disk, seen to be the one with that sha256."""
        path = self._path(window)
        with files.naming("read", path):
            found = self.archive.read(path.read_bytes(), window)
        if found.sha256 != sha256:
            raise StateDamaged(f"{str(path)!r} changed since it was written; check the disk")
        return found

    def _links(self, first: int, stop: int | None) -> tuple[list[Link], list[int]]:
        """The records from `first` on, checked and put on disk, and the windows that lack one."""
        known = [window for window in self.archive.windows() if window >= first]
        end = stop if stop is not None else max(known, default=first - 1) + 1
        links, gaps = [], []
        for window in range(first, end):
            document = self.archive.document(window)
            if document is None:
                gaps.append(window)
                continue
            found = self.archive.read(document, window)
            path = self._path(window)
            with files.naming("write a record to", path):
                path.write_bytes(document)
            made = found.artifact
            digests = (made.prev, made.base_digest, made.digest)
            links.append(Link(window, found.sha256, *digests, made.body_bytes))
        return links, gaps

    def _path(self, window: int) -> Path:
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


def check_chain(links: Sequence[Link]) -> None:
    """StateDamaged unless each record names the one before it, and its weights."""
    for before, link in pairwise(links):
        if (link.prev, link.base_digest) != (before.sha256, before.digest):
            raise StateDamaged(
                f"the record of window {link.window} does not follow that of window "
                f"{before.window}; the archive holds two chains, see who writes to it"
            )
