"""Cuts the power after many events of a recorded run and looks for a promise that does not hold."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.power import images, machines
from tests.faults.power.check import Checker
from tests.faults.power.disk import Disk
from tests.faults.power.images import Image
from tests.faults.power.promises import Broken, Mark
from tests.faults.power.trace import NO_SYNC, Event

_UNCHANGING = {"close", "dup", "seek"}
WINDOW = 40  # events after a sync that was left out, in which its absence may show


@dataclass(frozen=True)
class Cut:
    """The power goes after event `index`; `promised` is what had been said by then."""

    index: int
    event: Event
    disk: Disk
    promised: Sequence[Mark]

    def __str__(self) -> str:
        return f"event {self.index} ({self.event.name} {' '.join(self.event.paths)})"


def cuts(
    events: Sequence[Event], *, drops: Callable[[Event], bool] = lambda _: False
) -> Iterator[Cut]:
    """A cut after every event that changed something; syncs that `drops` are as if not there."""
    disk, promised = Disk(str(machines.OPERATOR)), list[Mark]()
    for index, event in enumerate(events):
        disk.apply(NO_SYNC if drops(event) else event)
        if event.mark:
            promised.append(event.mark)
        if event.name not in _UNCHANGING:
            yield Cut(index, event, disk, tuple(promised))


@dataclass
class Survey:
    """What many power cuts came to."""

    distinct: set[str] = field(default_factory=set)
    completed: int = 0
    broken: list[str] = field(default_factory=list)


def survey(
    events: Sequence[Event], checker: Checker, scratch: Path, *, seed: int, wanted: int, runs: int
) -> Survey:
    """Checks `wanted` different images from cuts all over the run; lets `runs` of them go on."""
    done = Survey()
    per_cut = wanted / sum(1 for _ in cuts(events))
    for number, cut in enumerate(cuts(events), start=1):
        # Evenly over the run: where images are alike, the next cuts make up for it.
        due = math.ceil(number * per_cut)
        for name, make in _shuffled(cut, seed=seed, count=2 * math.ceil(per_cut) + 2):
            if len(done.distinct) >= due:
                break
            image = make(cut.disk)
            digest = image.digest()
            if digest not in done.distinct:
                done.distinct.add(digest)
                ends = len(done.distinct) * runs // wanted > done.completed
                _check(done, checker, cut, name, image, scratch=scratch, completes=ends)
    return done


def _shuffled(cut: Cut, *, seed: int, count: int) -> list[tuple[str, images.Make]]:
    """The kinds of images of one cut, in another order each time."""
    kinds = images.kinds(seed=f"{seed}/{cut.index}", count=count)
    random.Random(f"{seed}/{cut.index}").shuffle(kinds)
    return kinds


def _check(
    done: Survey,
    checker: Checker,
    cut: Cut,
    name: str,
    image: Image,
    *,
    scratch: Path,
    completes: bool,
) -> None:
    try:
        checker.check(image, cut.promised, scratch=scratch)
        if completes:
            done.completed += 1
            checker.complete(image, scratch=scratch)
    except Broken as error:
        done.broken.append(f"{cut}, {name}: {error}")


def find_broken(
    events: Sequence[Event], checker: Checker, scratch: Path, *, drops: Callable[[Event], bool]
) -> str | None:
    """The first promise that breaks when the syncs that `drops` are left out, or None."""
    # Where something was just promised first: most show there, with everything unsure lost.
    for cut in cuts(events, drops=drops):
        if cut.event.mark:
            for name, make in images.kinds(seed="", count=0):
                if found := _broken(checker, cut, name, make(cut.disk), scratch):
                    return found
    for count in (2, 20):
        last = -WINDOW - 1
        for cut in cuts(events, drops=drops):
            last = cut.index if drops(cut.event) else last
            if cut.index - last <= WINDOW:
                for name, make in images.kinds(seed=str(cut.index), count=count):
                    if found := _broken(checker, cut, name, make(cut.disk), scratch):
                        return found
    return None


def _broken(checker: Checker, cut: Cut, name: str, image: Image, scratch: Path) -> str | None:
    try:
        checker.check(image, cut.promised, scratch=scratch)
    except Broken as error:
        return f"{cut}, {name}: {error}"
    return None
