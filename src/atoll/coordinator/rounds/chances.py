"""When a worker that an open round went on without may be given rows of it once more."""

from collections.abc import Container

from atoll.clock import Clock
from atoll.strategies.base import Lease

FIRST_WAIT_SECONDS = 1.0  # after the second time; each twice the one before
LONGEST_WAIT_SECONDS = 32.0


class Chances:
    """Each time that a worker is left out of one round it waits longer; the first time not at all.

    Else a round that is short would give rows to one that spoils every contribution as fast as it
    can, with a record each. Used under the lock of `Rounds`. In memory: a restart forgets it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waits: dict[Lease, tuple[float, float]] = {}  # until when, and how long the next is

    def lost(self, lease: Lease) -> None:
        """The round goes on without it, once more."""
        _, seconds = self._waits.get(lease, (0.0, 0.0))
        longer = min(LONGEST_WAIT_SECONDS, 2 * seconds or FIRST_WAIT_SECONDS)
        self._waits[lease] = (self._clock.now() + seconds, longer)

    def has(self, lease: Lease) -> bool:
        """Whether it may be given rows now."""
        wait = self._waits.get(lease)
        return wait is None or self._clock.now() >= wait[0]

    def hold(self, rounds: Container[int]) -> None:
        """Rounds other than these are closed."""
        self._waits = {lease: wait for lease, wait in self._waits.items() if lease[0] in rounds}
