"""One recorded run, read: its events, its promises, and where they came from."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.faults.power import recorder, trace
from tests.faults.power.machines import OPERATOR
from tests.faults.power.promises import Mark
from tests.faults.power.trace import NO_SYNC, Event

_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Recording:
    """The events of a run and the files that it left in `root`."""

    root: Path
    events: Sequence[Event]

    @property
    def marks(self) -> list[Mark]:
        return [event.mark for event in self.events if event.mark]


def record(directory: Path, *, synchronous: str = "FULL") -> Recording:
    """Runs the program once."""
    written = recorder.record(directory, synchronous=synchronous)
    root = directory / "root"
    events = trace.read(written, root, directory / "marks")
    return Recording(root, [NO_SYNC if _is_favour(event) else event for event in events])


def _is_favour(event: Event) -> bool:
    """A sync that nobody promises.

    SQLite's documentation of VACUUM INTO says that it does not sync the new file. 3.40.1 and 3.53.4
    do; the copy has to last without that.
    """
    by_sqlite = event.name == "sync" and event.site is None
    return by_sqlite and event.paths[0].startswith(str(OPERATOR))


@contextmanager
def scratch() -> Iterator[Path]:
    """A path for images, in memory where there is one: they are many and short-lived."""
    parent = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="atoll-power-", dir=parent) as directory:
        yield Path(directory) / "disks"
