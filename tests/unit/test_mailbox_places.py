"""Messages that are received where they belong: who may write to a place, and until when."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from atoll.clock import SystemClock
from atoll.collectives import memory
from atoll.collectives.base import Key, Label
from atoll.collectives.mailbox import Mailbox
from atoll.collectives.places import Added, Written
from atoll.errors import Forbidden, GroupBroken, MissingRanks, StaleGeneration
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
def values() -> Tensor:
    return torch.zeros(4, dtype=torch.uint8)


@pytest.fixture
def place(box: Mailbox, values: Tensor) -> Written:
    made = Written(values)
    box.expect(label(), 1, made)
    return made


def test_message_is_received_where_it_was_expected(box, place, values):
    with box.landing(label(), 1, 4, never) as given:
        given.put(memoryview(bytearray(b"four")))
        box.landed(label(), 1, given)

    assert box.take(label(), 1, nbytes=4, until=CLOCK.now()) is place.memory
    assert bytes(values.tolist()) == b"four"
    assert box.deliver(label(), 1, b"four") == "repeated"


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


def test_place_is_never_given_for_what_is_here(box, place):
    box.deliver(label(), 1, b"four")
    box.expect(label(), 1, place)

    with box.landing(label(), 1, 4, never) as given:
        assert given is None


def test_message_that_was_in_hand_before_it_was_expected_is_taken_as_it_is(box):
    with box.landing(label(), 1, 4, never) as given:
        assert given is None
    box.expect(label(), 1, Written(torch.zeros(4, dtype=torch.uint8)))

    assert box.deliver(label(), 1, b"four") == "taken"

    with box.landing(label(), 1, 4, never) as given:  # nobody writes it a second time
        assert given is None
    assert box.take(label(), 1, nbytes=4, until=CLOCK.now()) == b"four"


def test_message_in_hand_is_dropped_once_a_later_connection_has_begun_it(box, place):
    """It would be added to what was added of it already."""
    with box.landing(label(), 1, 4, never):
        pass  # which broke off

    assert box.deliver(label(), 1, b"four") == "repeated"

    with pytest.raises(MissingRanks):
        box.take(label(), 1, nbytes=4, until=CLOCK.now())
    with box.landing(label(), 1, 4, never) as given:  # sent again
        assert given is place


def test_who_brings_a_message_anew_cuts_off_who_still_receives_it(box, place):
    receives, is_cut = threading.Event(), threading.Event()

    def first() -> None:
        with box.landing(label(), 1, 4, is_cut.set):
            receives.set()
            assert is_cut.wait(10)

    with ThreadPoolExecutor(1) as pool:
        earlier = pool.submit(first)
        receives.wait(10)
        with box.landing(label(), 1, 4, never) as given:
            assert given is place
            assert earlier.result(10) is None


def test_what_is_to_be_done_then_is_done_before_anybody_has_the_message(box, values):
    seen = []
    place = Written(values, lambda: seen.append(box.missing([(label(), 1)])))
    box.expect(label(), 1, place)

    with box.landing(label(), 1, 4, never) as given:
        box.landed(label(), 1, given)

    assert seen == [[1]]
    assert box.missing([(label(), 1)]) == []


def test_what_is_received_at_its_place_takes_no_room(box):
    for start in range(0, 200, 4):  # of 100 bytes
        box.expect(label(start=start), 1, Written(torch.zeros(4, dtype=torch.uint8)))
    for start in range(0, 200, 4):
        with box.landing(label(start=start), 1, 4, never) as given:
            box.landed(label(start=start), 1, given)

    for start in range(0, 200, 4):
        box.take(label(start=start), 1, nbytes=4, until=CLOCK.now())
    assert box.deliver(label(start=200), 1, bytes(100)) == "taken"  # all of the room is free


@pytest.mark.parametrize("order", [1, -1], ids=["lands, crowds", "crowds, lands"])
def test_who_waits_makes_room_though_more_is_to_come_at_places(box, place, order):
    """Rank 2's next message wants room; rank 1's first is taken before it, its second is away."""
    box.expect(label(start=4), 1, Written(torch.zeros(4, dtype=torch.uint8)))
    box.deliver(label(), 2, bytes(90))

    def take() -> None:
        box.take(label(), 1, nbytes=4, until=CLOCK.now() + 20)
        box.take(label(), 2, nbytes=90, until=CLOCK.now() + 20)

    def land() -> None:
        with box.landing(label(), 1, 4, never) as given:
            box.landed(label(), 1, given)

    def crowd() -> None:
        box.deliver(label(start=4), 2, bytes(90))

    with ThreadPoolExecutor(3) as pool:
        begun = [pool.submit(one) for one in (take, *(land, crowd)[::order])]
        for one in begun:
            one.result(10)


def test_taken_message_leaves_no_place_behind(box, place):
    box.deliver(label(), 1, b"four")
    box.take(label(), 1, nbytes=4, until=CLOCK.now())

    with box.landing(label(), 1, 4, never) as given:
        assert given is None


def test_place_that_was_withdrawn_meanwhile_is_nobodys(box, values):
    done, is_cut = [], threading.Event()
    box.expect(label(), 1, Written(values, lambda: done.append(1)))

    with ThreadPoolExecutor(1) as pool:
        with box.landing(label(), 1, 4, is_cut.set) as given:
            withdrawn = pool.submit(box.withdraw)
            assert is_cut.wait(10)
            box.landed(label(), 1, given)
        withdrawn.result(10)

    assert done == []
    assert box.missing([(label(), 1)]) == [1]


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


# Sums as they come


class Wire:
    """Bytes that come until it breaks."""

    def __init__(self, data: bytes) -> None:
        self._left = data

    def read(self, into: memoryview) -> bool:
        got, self._left = self._left[: len(into)], self._left[len(into) :]
        into[: len(got)] = got
        return len(got) == len(into)


@pytest.mark.parametrize("broken_after", [0, 3, 8, 12, 17, 32, 39])
@pytest.mark.parametrize("in_place", [True, False])
def test_message_that_broke_off_is_added_once_when_it_comes_again(broken_after, in_place):
    own, came = torch.arange(1.0, 11.0), torch.arange(10.0) * 100
    wanted = came + own
    total = own if in_place else torch.zeros(10)
    room, sent = memoryview(bytearray(8)), bytes(memory.bytes_of(came))
    place = Added(own, total)

    assert not place.receive(Wire(sent[:broken_after]).read, room)
    assert not place.receive(Wire(sent[: broken_after // 2]).read, room)  # and once more, sooner
    assert place.receive(Wire(sent).read, room)

    assert torch.equal(total, wanted)


def test_rest_of_a_message_that_broke_off_may_come_whole():
    own, came = torch.arange(1.0, 11.0), torch.arange(10.0) * 100
    wanted = came + own
    place = Added(own, own)
    sent = bytes(memory.bytes_of(came))
    assert not place.receive(Wire(sent[:20]).read, memoryview(bytearray(8)))
    assert own[:4].tolist() == wanted[:4].tolist(), "the control: some of it was added"

    place.put(memoryview(bytearray(sent)))

    assert torch.equal(own, wanted)


def test_sum_that_forgets_what_it_added_is_found_out():
    """The control of the two above."""
    own, came = torch.arange(1.0, 11.0), torch.arange(10.0) * 100
    wanted, sent = came + own, bytes(memory.bytes_of(came))
    room = memoryview(bytearray(8))

    Added(own, own).receive(Wire(sent[:20]).read, room)
    Added(own, own).receive(Wire(sent).read, room)

    assert not torch.equal(own, wanted)


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
