"""Keys of a window's collectives: all ranks ask for them in one order, none is used twice."""

from itertools import count

from atoll.collectives.base import Key, Op


class Turns:
    """Counts the collectives of one window. Each rank has its own; all count alike."""

    def __init__(self, group: int, window: int) -> None:
        self._group, self._window = group, window
        self._units = count()

    def next(self, op: Op) -> Key:
        """The key of the next collective."""
        return Key(self._group, self._window, op, 0, next(self._units))
