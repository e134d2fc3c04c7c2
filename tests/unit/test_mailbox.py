"""What a mailbox takes, what it refuses, and what it leaves as it was."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from atoll.clock import SystemClock
from atoll.collectives.base import Key, Label
from atoll.collectives.mailbox import Mailbox
from atoll.errors import Forbidden, GroupBroken, MissingRanks, ProtocolError, StaleGeneration
from atoll.layout import Span

CLOCK = SystemClock()
LIMIT = 100


def mailbox(**changes: Any) -> Mailbox:
    given = {"group": 7, "rank": 0, "size": 3, "clock": CLOCK, "limit_bytes": LIMIT, **changes}
    return Mailbox(**given)


def label(step: int = 5, *, group: int = 7, start: int = 0, **changes: Any) -> Label:
    key = Key(group=group, step=step, op="reduce", **changes)
    return Label(key, 0, Span(start, start + 4))


def soon() -> float:
    return CLOCK.now() + 10.0


def at_once() -> float:
    return CLOCK.now()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def test_message_waits_until_it_is_wanted():
    box = mailbox()

    assert box.deliver(label(), 1, b"four") == "taken"

    assert box.take(label(), 1, nbytes=4, until=at_once()) == b"four"


def test_messages_are_told_apart_by_everything_they_say_and_by_their_sender():
    box, made = mailbox(), label()
    near = [
        *(label(6), label(start=4), label(micro=1), label(unit=1)),
        Label(made.key, 1, made.span),
        Label(Key(group=7, step=5, op="gather"), 0, made.span),
    ]
    for number, one in enumerate(near):
        box.deliver(one, 1, bytes([number]))
    box.deliver(made, 2, b"2")

    with pytest.raises(MissingRanks):
        box.take(made, 1, nbytes=1, until=at_once())

    assert [box.take(one, 1, nbytes=1, until=at_once()) for one in near] == [
        bytes([number]) for number in range(len(near))
    ]


@pytest.mark.parametrize("is_taken", [False, True])
def test_same_message_again_changes_nothing(is_taken):
    box = mailbox()
    box.deliver(label(), 1, b"once")
    if is_taken:
        box.take(label(), 1, nbytes=4, until=at_once())

    assert box.deliver(label(), 1, b"more") == "repeated"

    if is_taken:
        with pytest.raises(MissingRanks):
            box.take(label(), 1, nbytes=4, until=at_once())
    else:
        assert box.take(label(), 1, nbytes=4, until=at_once()) == b"once"


@pytest.mark.parametrize(
    ("made", "sender", "refusal"),
    [
        (label(), 0, Forbidden),  # its own rank
        (label(), 3, Forbidden),
        (label(group=6), 1, StaleGeneration),
        (label(group=8), 1, StaleGeneration),
        (label(3), 1, ProtocolError),
    ],
)
def test_what_does_not_belong_here_is_refused_and_takes_no_room(made, sender, refusal):
    box = mailbox()
    box.advance(5)

    with pytest.raises(refusal):
        box.deliver(made, sender, b"x" * LIMIT)

    assert box.deliver(label(), 1, b"y" * LIMIT) == "taken"
    assert box.take(label(), 1, nbytes=LIMIT, until=at_once()) == b"y" * LIMIT


def test_step_before_is_still_taken_and_older_ones_leave_room():
    box = mailbox()
    box.deliver(label(3), 1, b"x" * LIMIT)

    box.advance(5)

    assert box.deliver(label(4), 1, b"y" * LIMIT) == "taken"


def test_message_of_the_step_before_is_not_taken_twice():
    box = mailbox()
    box.deliver(label(4), 1, b"once")
    box.take(label(4), 1, nbytes=4, until=at_once())

    box.advance(5)

    assert box.deliver(label(4), 1, b"once") == "repeated"


def test_step_that_is_over_stays_over_whatever_step_is_told_later():
    box = mailbox()
    box.advance(5)
    box.advance(2)

    with pytest.raises(ProtocolError):
        box.deliver(label(3), 1, b"late")


def test_wrong_size_is_refused_by_name():
    box = mailbox()
    box.deliver(label(), 1, b"four")

    with pytest.raises(ProtocolError, match=r"rank 1 sent 4 bytes of elements \[0, 4\).* take 16"):
        box.take(label(), 1, nbytes=16, until=at_once())


# Room


class WatchedClock(SystemClock):
    """Says when somebody begins to wait by it and finds that it must."""

    def __init__(self) -> None:
        self.waits = threading.Semaphore(0)

    def wait_for(
        self,
        holds: Callable[[], object],
        changed: threading.Condition,
        *,
        seconds: float | None = None,
    ) -> bool:
        def watched() -> object:
            found = holds()
            if not found:
                self.waits.release()
            return found

        return super().wait_for(watched, changed, seconds=seconds)


@pytest.fixture
def watched() -> WatchedClock:
    return WatchedClock()


def begun(pool: ThreadPoolExecutor, clock: WatchedClock, work: Callable[[], object]) -> Future[Any]:
    """Something in another thread that has come as far as waiting."""
    made = pool.submit(work)
    assert clock.waits.acquire(timeout=10)
    return made


def test_sender_waits_for_room_and_no_other_does(pool, watched):
    box = mailbox(clock=watched)
    box.deliver(label(start=0), 1, b"x" * LIMIT)

    waiting = begun(pool, watched, lambda: box.deliver(label(start=4), 1, b"y"))

    assert box.deliver(label(start=0), 2, b"z" * LIMIT) == "taken"
    assert not waiting.done()
    box.take(label(start=0), 1, nbytes=LIMIT, until=at_once())
    assert waiting.result(10) == "taken"


def test_message_above_the_limit_goes_alone():
    assert mailbox().deliver(label(), 1, b"x" * (LIMIT + 1)) == "taken"


def test_sender_that_waits_for_room_learns_that_its_step_is_over(pool, watched):
    box = mailbox(clock=watched)
    box.deliver(label(9), 1, b"x" * LIMIT)
    waiting = begun(pool, watched, lambda: box.deliver(label(4), 1, b"y"))

    box.advance(6)

    with pytest.raises(ProtocolError, match="step=4 of the message is over"):
        waiting.result(10)


# The end


def test_abort_wakes_who_waits_and_the_first_reason_stands(pool, watched):
    box = mailbox(clock=watched)
    box.deliver(label(start=0), 1, b"x" * LIMIT)
    room = begun(pool, watched, lambda: box.deliver(label(start=4), 1, b"y"))
    message = begun(pool, watched, lambda: box.take(label(start=8), 2, nbytes=1, until=soon()))

    box.abort(GroupBroken("first"))
    box.abort(GroupBroken("second"))

    for waiting in (room, message):
        with pytest.raises(GroupBroken, match="first"):
            waiting.result(10)
    with pytest.raises(GroupBroken, match="first"):
        box.deliver(label(start=12), 2, b"late")


def test_those_who_did_not_come_are_named():
    box = mailbox(size=5)
    box.deliver(label(), 1, b"here")
    box.deliver(label(), 2, b"gone")
    box.take(label(), 2, nbytes=4, until=at_once())

    assert box.missing([(label(), sender) for sender in (1, 2, 3, 4)]) == [3, 4]
