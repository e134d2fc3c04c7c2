"""A rank that is asked to go, by Ctrl-C or SIGTERM: it finishes what the others wait for first.

A step that one rank leaves is lost for all. So the step under way is made, and what is saved
becomes consistent and is uploaded; then the rank goes, and the others go on from there.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class Leaving:
    """Whether this rank is asked to go, and whether others count on it just now.

    `ask` is for a signal handler, which Python runs in the thread that trains.
    """

    def __init__(self) -> None:
        self.is_asked = False
        self._is_needed = False

    def ask(self) -> None:
        """KeyboardInterrupt at once when nothing is under way, and when asked a second time."""
        if self.is_asked or not self._is_needed:
            raise KeyboardInterrupt
        self.is_asked = True

    @contextmanager
    def needed(self) -> Iterator[None]:
        """While others count on this rank, the first wish is only noted; whoever is here heeds it.

        KeyboardInterrupt at the end, when there was one.
        """
        self._is_needed = True
        try:
            yield
        finally:
            self._is_needed = False
        self.check()

    def check(self) -> None:
        """KeyboardInterrupt when this rank was asked to go."""
        if self.is_asked:
            raise KeyboardInterrupt
