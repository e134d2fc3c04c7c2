"""Which pieces of saves a rank reads to have its part of a model that was cut for other ranks.

A pure function: every element that the new rank holds is read once, from the part of the one old
rank that held it, and nothing else is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.errors import ConfigError
from atoll.layout import ELEMENT_BYTES, Span
from atoll.strategies.sharded.holding import SECTIONS, Holding, holdings


@dataclass(frozen=True, slots=True)
class Read:
    """Elements of one section, which lie together in an old part and in the new one."""

    section: int
    part: int  # old rank
    holder: int  # rank of the new group to read it from; -1: nobody in particular
    start: int  # elements of the old part's section
    stop: int
    place: int  # where they begin in the new rank's section

    def __len__(self) -> int:
        return self.stop - self.start

    def byte_range(self, old: Holding) -> tuple[int, int]:
        """Where they lie in the old rank's save."""
        base = self.section * old.elements
        return (base + self.start) * ELEMENT_BYTES, (base + self.stop) * ELEMENT_BYTES


def reads(new: Holding, old_size: int, holders: Sequence[Sequence[int]] = ()) -> list[Read]:
    """What `new` reads of the parts of `old_size` ranks, part by part in the order of the bytes.

    `holders` say which ranks of the new group have each part: a rank that has it itself reads its
    own, the others take turns. ConfigError for a part that is needed and that nobody has.
    """
    return [
        Read(section, part, _holder(new.rank, part, holders), start, stop, place)
        for part, old in enumerate(holdings(new.units, old_size))
        for section in range(len(SECTIONS))
        for start, stop, place in _common(old, new)
    ]


def flat_reads(new: Holding) -> list[tuple[Span, int]]:
    """What `new` reads of the whole model's flat buffer, and where that goes in its section."""
    return [(s, place) for s, place in zip(new.spans, new.places, strict=True) if len(s)]


def _common(old: Holding, new: Holding) -> list[tuple[int, int, int]]:
    """What both hold: start and stop in a section of the old one, start in one of the new."""
    found: list[tuple[int, int, int]] = []
    for a, b, at_old, at_new in zip(old.spans, new.spans, old.places, new.places, strict=True):
        start, stop = max(a.start, b.start), min(a.stop, b.stop)
        if start >= stop:
            continue
        begin = at_old + start - a.start
        place = at_new + start - b.start
        last = found[-1] if found else (0, -1, 0)
        # Units lie next to each other in both: one read is enough.
        if last[1] == begin and last[2] + last[1] - last[0] == place:
            found[-1] = (last[0], begin + stop - start, last[2])
        else:
            found.append((begin, begin + stop - start, place))
    return found


def _holder(rank: int, part: int, holders: Sequence[Sequence[int]]) -> int:
    if not holders:
        return -1
    having = holders[part] if part < len(holders) else ()
    if not having:
        raise ConfigError(
            f"part {part} of the save is on no rank's disk; all {len(holders)} are needed, so go "
            f"back to a checkpoint"
        )
    return rank if rank in having else having[rank % len(having)]
