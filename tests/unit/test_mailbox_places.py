"""Messages that are received where they belong: who may write to a place, and until when."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from atoll.clock import SystemClock
from atoll.collectives import memory
from atoll.collectives.base import Key, Label
from atoll.collectives.mailbox import Mailbox
from atoll.errors import Forbidden, GroupBroken, StaleGeneration
from atoll.layout import Span

CLOCK = SystemClock()


def label(*, group: int = 7, start: int = 0) -> Label:
    return Label(Key(group=group, step=5, op="gather"), 0, Span(start, start + 4))


def never() -> None:
    raise AssertionError("nobody had to be cut off")


@pytest.fixture
def box() -> Mailbox:
    return Mailbox(group=7, rank=0, size=3, clock=CLOCK, limit_bytes=100)


@pytest.fixture
def place(box: Mailbox) -> memoryview:
    made = memoryview(bytearray(4))
    box.expect(label(), 1, made)
    return made


def test_message_is_written_where_it_was_expected(box, place):
    with box.landing(label(), 1, 4, never) as given:
        given[:] = b"four"
    assert box.deliver(label(), 1, given) == "taken"

    assert box.take(label(), 1, nbytes=4, until=CLOCK.now()) is place
    assert bytes(place) == b"four"


@pytest.mark.parametrize(
    ("other", "sender", "nbytes"),
    [(label(start=4), 1, 4), (label(), 2, 4), (label(), 1, 3), (label(), 1, 5)],
)
def test_other_message_gets_no_place(box, place, other, sender, nbytes):
    with box.landing(other, sender, nbytes, never) as given:
        assert given is None
    with box.landing(label(), 1, 4, never) as given:  # the control
        assert given is place


@pytest.mark.parametrize(
    ("one", "sender", "refusal"), [(label(group=6), 1, StaleGeneration), (label(), 4, Forbidden)]
)
def test_stranger_and_former_group_are_refused_before_they_write(box, place, one, sender, refusal):
    with pytest.raises(refusal), box.landing(one, sender, 4, never):
        pass


def test_place_is_given_once_and_never_for_what_is_here(box, place):
    with box.landing(label(), 1, 4, never) as first, box.landing(label(), 1, 4, never) as second:
        assert (first, second) == (place, None)
    box.deliver(label(), 1, b"four")
    box.expect(label(), 1, place)
    with box.landing(label(), 1, 4, never) as given:
        assert given is None


def test_taken_message_leaves_no_place_behind(box, place):
    box.deliver(label(), 1, b"four")
    box.take(label(), 1, nbytes=4, until=CLOCK.now())

    with box.landing(label(), 1, 4, never) as given:
        assert given is None


def test_withdrawn_place_is_given_to_nobody(box, place):
    box.withdraw()

    with box.landing(label(), 1, 4, never) as given:
        assert given is None


def test_withdrawing_cuts_off_who_writes_and_waits_until_he_has_ended(box, place):
    writes, is_cut, ended = threading.Event(), threading.Event(), threading.Event()

    def write() -> bool:
        with box.landing(label(), 1, 4, is_cut.set):
            writes.set()
            was_cut = is_cut.wait(10)
            ended.set()
            return was_cut

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        writes.wait(10)
        box.withdraw()
        assert ended.is_set()
        assert writing.result()


def test_after_an_abort_nobody_is_given_a_place(box, place):
    box.abort(GroupBroken("over"))

    with pytest.raises(GroupBroken), box.landing(label(), 1, 4, never):
        pass


# Memory for messages that nobody expected


def address(view: memoryview) -> int:
    return memory.tensor_of(view, torch.uint8).data_ptr()


def test_buffer_is_given_again_once_nobody_looks_at_it():
    buffers = memory.Buffers(8, kept=2)
    first = buffers.take(8)
    first_at = address(first)
    looked_at = memory.tensor_of(first, torch.uint8)
    del first

    second = buffers.take(4)
    assert (len(second), address(second) == first_at) == (4, False)
    del looked_at
    assert address(buffers.take(8)) == first_at


def test_only_so_many_buffers_lie_unused():
    buffers = memory.Buffers(1 << 20, kept=2)
    views = [buffers.take(8) for _ in range(5)]
    places = {address(view) for view in views}
    del views

    again = [buffers.take(8) for _ in range(2)]
    assert {address(view) for view in again} <= places
    assert len(buffers.unused) == 0
    del again
    assert len(buffers.unused) == 2
