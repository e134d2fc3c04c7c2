"""Where messages of other ranks wait until this rank wants them, in bounded memory.

Whoever carries messages delivers them here. A message is known by its label and its sender; the
same one again changes nothing, and one of another group, of a step that is over or from a stranger
is refused. Of each sender a few chunks may lie here; then its next delivery waits, and with it that
sender's stream, nobody else's.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

from atoll.clock import Clock
from atoll.collectives.base import Key, Label
from atoll.collectives.places import Place
from atoll.errors import Forbidden, MissingRanks, ProtocolError, StaleGeneration

Bytes = bytes | bytearray | memoryview
# A message by its sender and all that its label says but the group, step first. Plain numbers and
# no objects: thousands are remembered, and the garbage collector would visit each.
What = tuple[int, int, int, int, str, int, int, int, int]


def _what(label: Label, sender: int) -> What:
    key, span = label.key, label.span
    known = (key.step, sender, label.subgroup, key.micro, key.op, key.unit)
    return *known, label.phase, span.start, span.stop


class Mailbox:
    """The mailbox of one rank of one group. Thread-safe; waits by its clock, so fibers may use it.

    Steps below `floor` are over. Messages of one step may come while this rank is still at the one
    before, so that much is remembered of what was taken.
    """

    def __init__(self, *, group: int, rank: int, size: int, clock: Clock, limit_bytes: int) -> None:
        self._group = group
        self._senders = frozenset(range(size)) - {rank}
        self._clock = clock
        self._limit = limit_bytes  # of one sender's messages
        self._changed = threading.Condition()
        self._waiting: dict[What, Bytes] = {}
        self._due: dict[What, float] = {}  # of those that are still under way
        self._held = dict.fromkeys(self._senders, 0)  # bytes
        self._places: dict[What, Place] = {}  # of messages that need no memory of their own
        self._landing: dict[What, Callable[[], None]] = {}  # being received, and how that is ended
        self._begun: set[What] = set()  # of the places: those where something may have come
        self._crowded = 0  # how many wait for room
        self._ends = 0  # how many wait until somebody has ended that
        self._here: set[What] = set()  # of what waits: received at a place, so it takes no room
        self._taken: deque[tuple[int, set[What]]] = deque()  # by step, oldest first
        self._floor = 0
        self._error: Exception | None = None

    # Delivery

    def deliver(
        self, label: Label, sender: int, data: Bytes, *, due: float = 0.0
    ) -> Literal["taken", "repeated"]:
        """Takes a message in, once there is room for it; it is not read before the time `due`.

        Forbidden for a stranger, StaleGeneration for another group, ProtocolError for a step that
        is over: nothing changes then.
        """
        self._check(label.key, sender)
        what = _what(label, sender)

        def settled() -> bool:
            over = self._error is not None or label.key.step < self._floor
            return over or self._is_known(what) or self._has_room(sender, len(data))

        self._wait_for_room(settled)
        with self._changed:
            self._check(label.key, sender)
            # Begun at its place: this one was in hand before it was expected, on a connection that
            # a later one has replaced, whose message it is now.
            if self._is_known(what) or what in self._begun:
                return "repeated"
            self._places.pop(what, None)
            self._waiting[what] = data
            if due:
                self._due[what] = due
            self._held[sender] += len(data)
            self._changed.notify_all()
        return "taken"

    @contextmanager
    def landing(
        self, label: Label, sender: int, nbytes: int, cut: Callable[[], None]
    ) -> Iterator[Place | None]:
        """Where a message is to be received while it comes, if anybody has said so.

        Whoever is given a place writes there and nowhere else, and not after this, and says
        `landed` when it is whole; `cut`, called from another thread, makes him end soon. Who brings
        the same message anew cuts him off. What has no place is delivered.
        """
        self._check(label.key, sender)
        what = _what(label, sender)
        earlier = self._landing.get(what)
        if earlier is not None:
            earlier()
            self._wait_until(lambda: what not in self._landing)
        with self._changed:
            place = None if self._error is not None else self._places.get(what)
            if place is not None and len(place.memory) == nbytes:
                self._landing[what] = cut
                self._begun.add(what)
            else:
                place = None
        try:
            yield place
        finally:
            if place is not None:
                with self._changed:
                    del self._landing[what]
                    if self._ends:
                        self._changed.notify_all()

    def landed(self, label: Label, sender: int, place: Place) -> None:
        """The message is whole at its place; inside of its `landing`, and once."""
        self._check(label.key, sender)
        what = _what(label, sender)
        with self._changed:
            if self._places.get(what) is not place:
                return  # it was withdrawn
        if place.then is not None:
            place.then()  # before anybody can think that all is done
        with self._changed:
            self._places.pop(what, None)
            self._begun.discard(what)
            self._waiting[what] = place.memory
            self._here.add(what)
            if not self._places or self._crowded:  # who waits is woken once, not for each
                self._changed.notify_all()

    def _wait_for_room(self, settled: Callable[[], bool]) -> None:
        with self._changed:
            if settled():
                return
            self._crowded += 1
            self._changed.notify_all()  # who makes room may sleep, and what it wants be here
        self._clock.wait_for(settled, self._changed)
        with self._changed:
            self._crowded -= 1

    def _wait_until(self, ended: Callable[[], bool]) -> None:
        with self._changed:
            self._ends += 1
        self._clock.wait_for(ended, self._changed)
        with self._changed:
            self._ends -= 1

    def check_open(self) -> None:
        """Raises what the mailbox was aborted with."""
        if self._error is not None:
            raise self._error

    def _check(self, key: Key, sender: int) -> None:
        self.check_open()
        if sender not in self._senders:
            raise Forbidden(
                f"sender={sender} has no message for this rank; ranks {sorted(self._senders)} do"
            )
        if key.group != self._group:
            raise StaleGeneration(
                f"group={key.group} of the message is not this rank's, {self._group}; ask the "
                f"coordinator for the present one",
                present=self._group,
            )
        if key.step < self._floor:
            raise ProtocolError(
                f"step={key.step} of the message is over, this rank is at {self._floor}; drop it"
            )

    def _is_known(self, what: What) -> bool:
        return what in self._waiting or any(what in taken for _, taken in self._taken)

    def _has_room(self, sender: int, nbytes: int) -> bool:
        """A message larger than the limit goes alone."""
        return not self._held[sender] or self._held[sender] + nbytes <= self._limit

    # This rank's side

    def take(self, label: Label, sender: int, *, nbytes: int, until: float) -> Bytes:
        """The message, when it is here; MissingRanks at the time `until`.

        ProtocolError when it is not of the size that it must have.
        """
        what = _what(label, sender)
        if what not in self._waiting:
            self._clock.wait_for(
                lambda: self._error is not None or what in self._waiting,
                self._changed,
                seconds=max(0.0, until - self._clock.now()),
            )
        if self._due:
            self._wait_until_due(what, until)
        with self._changed:
            self.check_open()
            data = self._waiting.pop(what, None) if what not in self._due else None
            if data is None:
                raise MissingRanks(f"{label.key}: nothing came from rank {sender} in time")
            self._free(what, data)
            self._places.pop(what, None)
            self._remember(what)
            self._changed.notify_all()
        if len(data) != nbytes:
            whose = " of the whole group" if label.subgroup else ""
            raise ProtocolError(
                f"{label.key}: rank {sender}{whose} sent {len(data)} bytes of elements "
                f"[{label.span.start}, {label.span.stop}); they take {nbytes}"
            )
        return data

    def expect(self, label: Label, sender: int, place: Place) -> None:
        """A message that comes from now on may be received at `place`, until `withdraw`."""
        what = _what(label, sender)
        with self._changed:
            if not self._is_known(what):
                self._places[what] = place

    def withdraw(self) -> None:
        """Returns once nobody writes to a place, nor will: their memory may be used again."""
        with self._changed:
            self._places.clear()
            self._begun.clear()
            cuts = list(self._landing.values())
        if not cuts:
            return
        for cut in cuts:
            cut()
        self._wait_until(lambda: not self._landing)

    def _wait_until_due(self, what: What, until: float) -> None:
        due = self._due.get(what, 0.0)
        left = max(0.0, min(due, until) - self._clock.now())
        if left:
            self._clock.wait_for(lambda: self._error is not None, self._changed, seconds=left)
        if due <= until:
            self._due.pop(what, None)

    def missing(self, wanted: Iterable[tuple[Label, int]]) -> list[int]:
        """Of these messages, the senders of those that have not come."""

        def is_here(what: What) -> bool:
            return self._is_known(what) and self._due.get(what, 0.0) <= self._clock.now()

        with self._changed:
            found = {sender for label, sender in wanted if not is_here(_what(label, sender))}
        return sorted(found)

    def advance(self, step: int) -> None:
        """This rank is at `step`: messages of steps before the last are refused from now on."""
        with self._changed:
            self._floor = max(self._floor, step - 1)
            while self._taken and self._taken[0][0] < self._floor:
                self._taken.popleft()
            for what in [what for what in self._waiting if what[0] < self._floor]:
                self._free(what, self._waiting.pop(what))
                self._due.pop(what, None)
            self._changed.notify_all()

    def abort(self, error: Exception) -> None:
        """Whoever waits here, or comes later, raises `error`; the first one stands."""
        with self._changed:
            self._error = self._error or error
            self._waiting.clear()
            self._here.clear()
            self._due.clear()
            self._changed.notify_all()

    def _free(self, what: What, data: Bytes) -> None:
        if what in self._here:
            self._here.remove(what)
        else:
            self._held[what[1]] -= len(data)

    def _remember(self, what: What) -> None:
        step = what[0]
        for known, taken in self._taken:
            if known == step:
                taken.add(what)
                return
        self._taken.append((step, {what}))
