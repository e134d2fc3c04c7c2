"""Cuts the power after many events of a recorded run and looks for a promise that does not hold."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

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


class Survey:
    """Power cuts all over a run, and what they came to."""

    def __init__(self, checker: Checker, scratch: Path, *, wanted: int, runs: int) -> None:
        self.distinct: set[str] = set()
        self.completed = 0
        self.broken: list[str] = []
        self._checker = checker
        self._scratch = scratch
        self._wanted = wanted
        self._runs = runs

    def take(self, events: Sequence[Event], *, seed: int) -> Self:
        """Checks at least `wanted` different images; lets `runs` of them go on to the end."""
        per_cut = self._wanted / sum(1 for _ in cuts(events))
        for number, cut in enumerate(cuts(events), start=1):
            if cut.event.mark:  # a promise is new: it must hold from the first moment
                for name, make in images.kinds(seed="", count=0):
                    self._check(cut, name, make(cut.disk))
            # Evenly over the run: where images are alike, the next cuts make up for it.
            due = math.ceil(number * per_cut)
            for name, make in _shuffled(cut, seed=seed, count=2 * math.ceil(per_cut) + 2):
                if len(self.distinct) >= due:
                    break
                image = make(cut.disk)
                if image.digest() not in self.distinct:
                    self._check(cut, name, image)
        return self

    def _check(self, cut: Cut, name: str, image: Image) -> None:
        self.distinct.add(image.digest())
        try:
            self._checker.check(image, cut.promised, scratch=self._scratch)
            if len(self.distinct) * self._runs // self._wanted > self.completed:
                self.completed += 1
                self._checker.complete(image, scratch=self._scratch)
        except Broken as error:
            self.broken.append(f"{cut}, {name}: {error}")


def _shuffled(cut: Cut, *, seed: int, count: int) -> list[tuple[str, images.Make]]:
    """The kinds of images of one cut, in another order each time."""
    kinds = images.kinds(seed=f"{seed}/{cut.index}", count=count)
    random.Random(f"{seed}/{cut.index}").shuffle(kinds)
    return kinds


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
    for count in (2, 20, 100):  # one in a hundred drawn disks has to show it
        last = -WINDOW - 1
        for cut in cuts(events, drops=drops):
            # Or where a step begins that relies on it.
            if drops(cut.event) or (last >= 0 and "noted" in cut.event.mark):
                last = cut.index
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
