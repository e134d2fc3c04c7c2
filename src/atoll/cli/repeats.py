"""Log lines that repeat are counted: a flood of one event costs a line now and then.

Owns which line is a repeat and when its count is told. What a line looks like is `output`'s.
"""

import copy
import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from atoll.clock import Clock

WINDOW_SECONDS = 10.0
MOST_KEYS = 512  # remembered at a time, about 100 kB
# Of one event with other fields each time: names of islands that are evicted are worth a line each.
BURST = 20
COUNT = "repeated"  # the field that says how many lines were left out


@dataclass
class _Seen:
    """One line, or one event, in the window that began with its first."""

    began: float
    passed: int = 0
    left_out: int = 0
    last: logging.LogRecord | None = None  # of those that were left out


class Repeats(logging.Filter):
    """Lets the first of equal lines pass in every window, and tells how many did not.

    Equal is the same event with the same fields; of warnings and errors also a `BURST` of the same
    event, whatever its fields. The count is told with the next such line, or by itself, through
    `tell`, when another line comes after the window. Any thread may log.
    """

    def __init__(
        self,
        tell: Callable[[logging.LogRecord], object],
        clock: Clock,
        *,
        fields_of: Callable[[logging.LogRecord], Mapping[str, object]],
        window_seconds: float = WINDOW_SECONDS,
        most_keys: int = MOST_KEYS,
    ) -> None:
        super().__init__()
        self._tell = tell
        self._clock = clock
        self._fields_of = fields_of
        self._window_seconds = window_seconds
        self._most_keys = most_keys
        self._lock = threading.Lock()
        self._seen: OrderedDict[bytes, _Seen] = OrderedDict()  # in the order in which they began

    def filter(self, record: logging.LogRecord) -> bool:
        if hasattr(record, COUNT):
            return True  # one that tells a count
        with self._lock:
            keys = list(self._keys(record))
            due = [*self._ended(but=[key for key, _ in keys])]
            passes = self._passes(record, keys)
            due += self._forgotten()
        for told in due:
            self._tell(told)
        return passes

    @property
    def remembered(self) -> int:
        """How many lines and events are being counted."""
        return len(self._seen)

    def tell_rest(self) -> None:
        """Tells what was counted and not told yet; for the end of the process."""
        with self._lock:
            rest = [told for seen in self._seen.values() if (told := _told(seen))]
            self._seen.clear()
        for told in rest:
            self._tell(told)

    def _keys(self, record: logging.LogRecord) -> Iterator[tuple[bytes, int]]:
        """What the record is counted under, with how many may pass in a window."""
        event = (record.name, record.levelno, str(record.msg))
        # First: the lines of a flood that it leaves out must not push others out of memory.
        if record.levelno >= logging.WARNING:
            yield _key(event), BURST
        yield _key(event, record.args, sorted(self._fields_of(record).items())), 1

    def _passes(self, record: logging.LogRecord, keys: list[tuple[bytes, int]]) -> bool:
        now = self._clock.now()
        left_out = 0
        for key, most in keys:
            seen = self._seen.get(key)
            if seen is None or now - seen.began >= self._window_seconds:
                left_out += 0 if seen is None else seen.left_out
                seen = self._seen[key] = _Seen(now)
                self._seen.move_to_end(key)
            if seen.passed >= most:
                seen.left_out += 1 + left_out
                seen.last = record
                return False
        for key, _ in keys:
            self._seen[key].passed += 1
        if left_out:
            setattr(record, COUNT, left_out)
        return True

    def _ended(self, *, but: list[bytes]) -> Iterator[logging.LogRecord]:
        """Counts of windows that are over; those of `but` go with the line that has come."""
        now = self._clock.now()
        for key, seen in list(self._seen.items()):
            if now - seen.began < self._window_seconds:
                return
            if key not in but:
                del self._seen[key]
                if told := _told(seen):
                    yield told

    def _forgotten(self) -> Iterator[logging.LogRecord]:
        """Counts of the oldest, where there are too many to remember."""
        while len(self._seen) > self._most_keys:
            _, seen = self._seen.popitem(last=False)
            if told := _told(seen):
                yield told


def _key(*parts: object) -> bytes:
    return hashlib.blake2b(repr(parts).encode("utf-8", "backslashreplace"), digest_size=16).digest()


def _told(seen: _Seen) -> logging.LogRecord | None:
    """The last line that was left out, with their number and without its traceback."""
    if seen.last is None:
        return None
    told = copy.copy(seen.last)
    told.exc_info, told.exc_text, told.stack_info = None, None, None
    setattr(told, COUNT, seen.left_out)
    return told
