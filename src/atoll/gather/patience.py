"""How often an archive's server is asked again after an error, and when that error stands."""

from atoll.clock import Clock

_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.1, 2.0


class Patience:
    """Waits between attempts, each time twice as long, until `seconds` are over.

    They are counted from the last word of the server. With `in_all` they are for everything that is
    asked, and what goes well in between takes nothing from them: for a rank that others wait for.
    """

    def __init__(self, clock: Clock, seconds: float, *, in_all: bool = False) -> None:
        self._clock, self._seconds, self._in_all = clock, seconds, in_all
        self._begun = self._asked = clock.now()
        self._wait = _FIRST_WAIT_SECONDS

    def deadline(self) -> float:
        """When a read that begins now has to end."""
        return (self._begun if self._in_all else self._clock.now()) + self._seconds

    def heard(self) -> None:
        """The server answered."""
        now = self._clock.now()
        self._begun = self._begun + (now - self._asked) if self._in_all else now
        self._asked, self._wait = now, _FIRST_WAIT_SECONDS

    def wait(self) -> bool:
        """Whether to ask again, after a while; False, at once, where it has been too long.

        Who was not answered for long has to expect that once more: it must fit, too.
        """
        now = self._clock.now()
        silent = now - self._asked
        if now + self._wait + silent - self._begun >= self._seconds:
            return False
        self._clock.sleep(self._wait)
        self._asked, self._wait = self._clock.now(), min(_LONGEST_WAIT_SECONDS, 2 * self._wait)
        return True
