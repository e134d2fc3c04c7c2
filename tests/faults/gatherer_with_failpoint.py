"""`atoll` that dies at one point of an island's own gather of a version, for the fault tests.

    gatherer_with_failpoint.py POINT@VERSION FOLDER join URL … --worker-id NAME …

Wraps the production code from outside; that code knows nothing of it. Points, each a SIGKILL:

    piece     when a first piece of another's object is on disk
    object    when a first object of another is whole
    fed       when a first piece of the version's frame was applied
    made      when all of it was, and what was fetched is still there
    none      nothing happens

FOLDER/written gets a line for each piece that came to disk: version, whose, where, how many bytes.
"""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

from atoll import cli
from atoll.cli import join  # noqa: F401  loaded at once, for lives that are forked
from atoll.gather.fetch import Fetched
from atoll.gather.spool import Part, Spool
from atoll.island.gather.base import Collect
from atoll.island.gather.buckets import IslandBuckets

POINTS = ("piece", "object", "fed", "made")


class Failpoint:
    """Where this island dies; others' objects are those that do not have its name."""

    def __init__(self, point: str, folder: Path, worker_id: str) -> None:
        self._point, self._folder, self._worker_id = point, folder, worker_id

    def at(self, point: str, version: int) -> None:
        if self._point == f"{point}@{version}":
            os.kill(os.getpid(), signal.SIGKILL)

    def of(self, part: Part) -> tuple[int, str] | None:
        """The version and the peer of an object under way; None for the island's own."""
        uid = part.path.stem
        return None if uid == self._worker_id else (int(part.path.parent.name), uid)

    def wrote(self, part: Part, start: int) -> None:
        if (found := self.of(part)) is not None:
            line = f"{found[0]} {found[1]} {start} {part.offset - start}\n"
            with (self._folder / "written").open("a") as file:  # one write, which appends
                file.write(line)
            self.at("piece", found[0])


def install(failpoint: Failpoint) -> None:
    collect, feed = IslandBuckets.collect, IslandBuckets._feed  # noqa: SLF001  # a point within
    write, finish = Part.write, Spool.finish

    def collects(self: IslandBuckets, wanted: Collect) -> None:
        version = wanted.window.round

        def sink(piece: bytes | memoryview) -> None:
            wanted.sink(piece)
            failpoint.at("fed", version)

        collect(self, replace(wanted, sink=sink))

    def feeds(self: IslandBuckets, wanted: Collect, spool: Spool, found: Fetched) -> None:
        feed(self, wanted, spool, found)
        failpoint.at("made", wanted.window.round)

    def writes(self: Part, piece: memoryview) -> None:
        start = self.offset
        write(self, piece)
        failpoint.wrote(self, start)

    def finishes(self: Spool, part: Part, sha256: str) -> None:
        finish(self, part, sha256)
        if (found := failpoint.of(part)) is not None:
            failpoint.at("object", found[0])

    # The point of this program.
    IslandBuckets.collect = collects  # type: ignore[method-assign]
    IslandBuckets._feed = feeds  # type: ignore[method-assign]  # noqa: SLF001
    Part.write = writes  # type: ignore[method-assign]
    Spool.finish = finishes  # type: ignore[method-assign]


def main() -> None:
    point, folder = sys.argv[1:3]
    sys.argv = ["atoll", *sys.argv[3:]]
    worker_id = sys.argv[sys.argv.index("--worker-id") + 1]
    install(Failpoint(point, Path(folder), worker_id))
    cli.main()


if __name__ == "__main__":
    main()
