"""What all ranks know at the end of a gather: the seed's `gather_result`, and what stands beside.

The same bits on every rank and at every number of ranks, but for `time` and who serves what.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from atoll import canonical
from atoll.gather.partial import Accepted, Partial, Settled, Skipped
from atoll.gather.settle import settled
from atoll.gather.state_dict import Entry


@dataclass(frozen=True, kw_only=True)
class Merged(Settled):
    """The peers of a window, in uid order. Nobody valid is an empty result, never None."""

    primaries: tuple[str, ...]  # intended, in uid order
    accepted: tuple[Accepted, ...]
    skipped: tuple[Skipped, ...]
    global_steps: tuple[int, ...]  # the base version, aligned with `uids`
    upload_bytes: int = 0
    time: float = field(compare=False)  # seconds, with reserves
    parts: tuple[Partial, ...] = field(compare=False, repr=False)
    # Lists aligned with `uids`, decoded when read. A rank by itself can read what it fetched, which
    # is all where it is alone. The shared one has everybody's: all ranks read it together, the same
    # names in the same order. Both are there until the next window, and empty after a replay.
    state_dict: Mapping[str, list[Entry]] = field(compare=False, repr=False, default_factory=dict)
    shared_state_dict: Mapping[str, list[Entry]] = field(
        compare=False, repr=False, default_factory=dict
    )

    @property
    def success_rate(self) -> float:
        """Accepted, with reserves, / primaries; 0.0 where there are none."""
        return len(self.accepted) / len(self.primaries) if self.primaries else 0.0

    @property
    def download_bytes(self) -> int:
        """Of the accepted objects."""
        return sum(one.nbytes for one in self.accepted)

    @property
    def missing(self) -> int:
        """How many more would make as many as there are primaries."""
        return max(0, len(self.primaries) - len(self.accepted))

    @property
    def holders(self) -> dict[str, int]:
        """The rank that has each accepted payload."""
        return {one.uid: one.rank for one in self.accepted}

    def plain(self) -> dict[str, object]:
        """All that is the same at every number of ranks, as JSON has it."""
        return {
            "accepted": Partial(0, self.accepted).plain()["accepted"],
            "download_bytes": self.download_bytes,
            "global_steps": list(self.global_steps),
            "primaries": list(self.primaries),
            "skipped": [[one.uid, str(one.reason), one.sentence] for one in self.skipped],
            "success_rate": self.success_rate,
            "upload_bytes": self.upload_bytes,
        }

    @property
    def digest(self) -> str:
        """sha256 of `plain`: equal on all ranks."""
        return canonical.sha256(self.plain())


def parts_of(result: Merged | Sequence[Partial]) -> Sequence[Partial]:
    """The settled partials of a merged result, or of partials as they come: each uid once."""
    return result.parts if isinstance(result, Merged) else settled(result)
