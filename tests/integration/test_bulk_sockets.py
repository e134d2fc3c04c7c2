"""Who may open a rank's bulk socket, once, and what it takes from it: the same as over gRPC."""

import contextlib
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from atoll.clock import SystemClock
from atoll.collectives import memory, places
from atoll.collectives.base import Key, Label
from atoll.collectives.grpc import bulk, sockets
from atoll.collectives.grpc.door import Door, Present
from atoll.collectives.grpc.server import RankServer
from atoll.collectives.grpc.trust import RANK_KEY, SECRET_KEY, Identity, Member, RankGroup
from atoll.collectives.mailbox import Mailbox
from atoll.collectives.places import Added, Written
from atoll.errors import (
    AddressUnreachable,
    CoordinatorUnreachable,
    Forbidden,
    GroupBroken,
    MissingRanks,
    NotReady,
    ProtocolError,
    StaleGeneration,
)
from atoll.layout import Span
from tests import ranks_on_loopback
from tests.bulk_sender import Broken, BulkSender, invitation, sent
from tests.ranks_on_loopback import Loopback

CLOCK = SystemClock()


class Called(Loopback):
    """Rank 0 of three is called, in group 7; the others are played."""

    box: Mailbox

    def enter(self, number: int = 7, *, secret: str = ranks_on_loopback.SECRET) -> RankGroup:
        self.box = Mailbox(group=number, rank=0, size=3, clock=CLOCK, limit_bytes=8)
        addresses = [member.address for member in self.group.members]
        group = self.group_at(addresses, number=number, secret=secret)
        self.servers[0].enter(group, self.box)
        return group

    def came(self, sender: int, *, step: int = 1, start: int = 0) -> bytes | None:
        label = Label(Key(group=7, step=step, op="reduce"), 0, Span(start, start + 4))
        try:
            return bytes(self.box.take(label, sender, nbytes=4, until=CLOCK.now()))
        except MissingRanks:
            return None

    def shown(self, rank: int = 1, **changes: str) -> tuple[tuple[str, str], ...]:
        return tuple({**dict(self.group.metadata(rank)), **changes}.items())

    def sender(self, rank: int = 1) -> BulkSender:
        own = self.identities[rank]
        port, key = invitation(self.group, self.shown(rank), to=0, identity=own)
        return BulkSender(port, key, identity=own, trusts=self.group.members[0].certificate_pem)


@pytest.fixture(params=[False, True], ids=["plain", "TLS"])
def called(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Called]:
    monkeypatch.setattr(ranks_on_loopback, "Loopback", Called)
    with ranks_on_loopback.servers(3, is_tls=request.param, number=7) as made:
        assert isinstance(made, Called)
        made.enter()
        yield made


def test_members_message_is_taken_as_its_senders(called):
    own = called.identities[1]

    assert sent(called.group, [(7, 1, b"four")], shown=called.shown(), identity=own) == 1

    assert (called.came(1), called.came(2)) == (b"four", None)


def test_messages_in_any_order_and_twice_lie_where_they_belong(called):
    sender = called.sender()
    for start, values in ((4, b"late"), (0, b"soon"), (4, b"more"), (0, b"soon")):
        sender.send(7, 1, values, start=start)
        sender.answer()
    sender.close()

    assert [called.came(1, start=start) for start in (0, 4)] == [b"soon", b"late"]
    assert called.came(1) is None


@pytest.mark.parametrize(
    ("group", "step", "refusal"),
    [(6, 9, StaleGeneration), (8, 9, StaleGeneration), (7, 3, ProtocolError)],
)
def test_message_of_another_group_or_a_step_that_is_over_is_refused(called, group, step, refusal):
    called.box.advance(9)
    sender = called.sender()

    sender.send(group, step, b"four")

    with pytest.raises(refusal):
        sender.answer()
    sender.close()
    assert called.came(1, step=step) is None


@pytest.mark.parametrize(
    "raw",
    [{"nbytes": 0}, {"nbytes": 1 << 40}, {"op": 9}, {"stop": -1 + (1 << 64), "nbytes": 8 << 20}],
    ids=str,
)
def test_message_that_no_rank_writes_is_refused(called, raw):
    sender = called.sender()

    sender.send(7, 1, b"four", **raw)

    with pytest.raises(ProtocolError):
        sender.answer()
    sender.close()
    assert called.came(1) is None


@pytest.mark.parametrize("nbytes", [5, 60])
def test_message_cut_off_in_the_middle_changes_nothing(called, nbytes):
    """In the middle of the header, and of the values."""
    sender = called.sender()
    sender.send(7, 1, b"four")
    sender.answer()
    sender.raw((b"\x40" + bytes(56) + b"half of it")[:nbytes])
    sender.close()

    again = called.sender()
    again.send(7, 1, b"next", start=4)
    again.answer()
    again.close()
    assert (called.came(1), called.came(1, start=4)) == (b"four", b"next")


def test_message_is_received_where_it_is_expected_and_nobody_writes_there_later(called):
    """The first half comes in time, the other one when the memory is somebody else's."""
    place = memoryview(bytearray(4))
    written = Written(memory.tensor_of(place, torch.uint8))
    called.box.expect(Label(Key(group=7, step=1, op="reduce"), 0, Span(0, 4)), 1, written)
    sender = called.sender()
    sender.send(7, 1, b"fo", nbytes=4, stop=4)
    until = CLOCK.now() + 20
    while bytes(place) != b"fo\0\0":  # the control: it is written as it comes
        assert CLOCK.now() < until

    called.box.withdraw()
    place[:] = b"else"
    with contextlib.suppress(OSError):
        sender.raw(b"ur")
    sender.close()

    assert (bytes(place), called.came(1)) == (b"else", None)
    again = called.sender()
    again.send(7, 1, b"four")
    again.answer()
    again.close()
    assert (bytes(place), called.came(1)) == (b"else", b"four")


def test_sum_of_a_message_that_broke_off_is_the_same_when_it_comes_again(called, monkeypatch):
    """Half of it was added when the socket ended; a new socket brings all of it."""
    monkeypatch.setattr(places, "ROOM_BYTES", 4)
    own, came = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.1, 20.0, 300.0, 4e7])
    wanted, sent_bytes = came + own, bytes(memory.bytes_of(came))
    label = Label(Key(group=7, step=1, op="reduce"), 0, Span(0, 16))
    called.box.expect(label, 1, Added(own, own))
    first = called.sender()
    first.send(7, 1, sent_bytes[:10], nbytes=16, stop=16)
    until = CLOCK.now() + 20
    while own[1] != wanted[1]:  # the control: it is added as it comes
        assert CLOCK.now() < until
    if called.identities[1] is None:
        first.close()  # else the later socket cuts it off

    again = called.sender()
    again.send(7, 1, sent_bytes)
    again.answer()
    again.send(7, 1, sent_bytes)  # and once more, for nothing
    again.answer()
    again.close()
    first.close()

    called.box.take(label, 1, nbytes=16, until=CLOCK.now())
    assert torch.equal(own, wanted)


@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "TLS"])
def test_sum_that_failed_leaves_its_memory_alone(is_tls, monkeypatch):
    """Rank 1 is played: it sends half of its part before the deadline, and the rest after it."""
    monkeypatch.setattr(places, "ROOM_BYTES", 4)
    with ranks_on_loopback.servers(2, is_tls=is_tls, number=7) as made:
        made.servers[1].enter(
            made.group, Mailbox(group=7, rank=1, size=2, clock=CLOCK, limit_bytes=100)
        )
        with made.member(0, bulk="tcp", way="ring", timeout_seconds=1) as ranks:
            own = torch.ones(4)
            begun = ranks.all_reduce(Key(group=7, step=1, op="reduce"), own)
            shown = tuple(made.group.metadata(1))
            port, key = invitation(made.group, shown, to=0, identity=made.identities[1])
            trusts = made.group.members[0].certificate_pem
            sender = BulkSender(port, key, identity=made.identities[1], trusts=trusts)
            half = struct.pack("<f", 3.0)
            sender.send(7, 1, half, nbytes=8, start=0, stop=2)
            with pytest.raises(MissingRanks):
                begun.wait()
            assert own.tolist() == [4.0, 1.0, 1.0, 1.0]  # the control: it is added as it comes

            own.fill_(5.0)
            with contextlib.suppress(OSError, Broken):  # it was cut off
                sender.raw(half)
                sender.answer()
            sender.close()
            assert own.unique().tolist() == [5.0]


@pytest.mark.parametrize("way", ["ring", "direct"])
@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "TLS"])
def test_gather_that_failed_leaves_its_memory_alone(is_tls, way):
    """Rank 1 is played: it sends half of its part before the deadline, and the rest after it."""
    with ranks_on_loopback.servers(2, is_tls=is_tls, number=7) as made:
        made.servers[1].enter(
            made.group, Mailbox(group=7, rank=1, size=2, clock=CLOCK, limit_bytes=100)
        )
        with made.member(0, bulk="tcp", way=way, timeout_seconds=1) as ranks:
            own, out = torch.ones(2), torch.zeros(4)
            gathered = ranks.all_gather(Key(group=7, step=1, op="gather"), own, out)
            shown = tuple(made.group.metadata(1))
            port, key = invitation(made.group, shown, to=0, identity=made.identities[1])
            trusts = made.group.members[0].certificate_pem
            sender = BulkSender(port, key, identity=made.identities[1], trusts=trusts)
            half = struct.pack("<f", 3.0)
            sender.send(7, 1, half, nbytes=8, op=0, start=2, stop=4)
            with pytest.raises(MissingRanks):
                gathered.wait()
            assert out.tolist() == [1.0, 1.0, 3.0, 0.0]  # the control: it is written as it comes

            out.fill_(5.0)
            with contextlib.suppress(OSError, Broken):  # it was cut off
                sender.raw(half)
                sender.answer()
            sender.close()
            assert out.unique().tolist() == [5.0]


def test_sender_that_has_filled_its_room_holds_up_nobody_else(called):
    first, second = called.sender(1), called.sender(2)
    for start in (0, 4, 8):
        first.send(7, 1, b"four", start=start)
    for _ in range(2):
        first.answer()

    second.send(7, 1, b"mine")
    second.answer()

    assert called.came(2) == b"mine"
    assert called.came(1) == b"four"  # which makes room for the third
    first.answer()
    first.close()
    second.close()


# Keys


def test_key_opens_one_socket(called):
    own, trusts = called.identities[1], called.group.members[0].certificate_pem
    port, key = invitation(called.group, called.shown(), to=0, identity=own)
    BulkSender(port, key, identity=own, trusts=trusts).close()

    for shown in (key, bytes(32), key[:-1] + b"\0"):
        with pytest.raises(Forbidden):
            BulkSender(port, shown, identity=own, trusts=trusts)


def test_new_key_makes_the_one_before_useless(called):
    own, trusts = called.identities[1], called.group.members[0].certificate_pem
    port, old = invitation(called.group, called.shown(), to=0, identity=own)
    _, new = invitation(called.group, called.shown(), to=0, identity=own)

    with pytest.raises(Forbidden):
        BulkSender(port, old, identity=own, trusts=trusts)

    BulkSender(port, new, identity=own, trusts=trusts).close()


@pytest.mark.parametrize(
    "changes", [{SECRET_KEY: "b" * 32}, {SECRET_KEY: ""}], ids=["wrong secret", "no secret"]
)
def test_stranger_gets_no_key(called, changes):
    with pytest.raises(Forbidden):
        invitation(called.group, called.shown(**changes), to=0, identity=called.identities[1])


def test_rank_that_only_measures_gives_no_key(called):
    called.servers[0].enter(called.group)

    with pytest.raises(NotReady):
        called.sender()


def test_key_of_a_group_that_is_over_opens_nothing(called):
    own, trusts = called.identities[1], called.group.members[0].certificate_pem
    port, key = invitation(called.group, called.shown(), to=0, identity=own)
    called.enter(8, secret="another secret of 32 characters or more")

    with pytest.raises(Forbidden):
        BulkSender(port, key, identity=own, trusts=trusts)


def test_key_that_a_former_group_gets_after_the_change_opens_nothing():
    """Its invitation was under way when all keys were dropped."""
    door = Door()
    listener = bulk.BulkListener("127.0.0.1", 0, door, identity=None)
    members = tuple(Member(f"w{k}", "127.0.0.1:1") for k in range(3))
    former, present = (
        Present(
            RankGroup(number, members, ranks_on_loopback.SECRET),
            Mailbox(group=number, rank=0, size=3, clock=CLOCK, limit_bytes=8),
            None,
        )
        for number in (7, 8)
    )
    door.present = present
    listener.dismiss()
    try:
        with pytest.raises(StaleGeneration, match="group=7 of the stream is over"):
            BulkSender(*listener.invited(former, 1))
        BulkSender(*listener.invited(present, 1)).close()  # the control
    finally:
        listener.close()


def test_open_socket_of_a_former_group_takes_nothing_more(called):
    busy, idle = called.sender(1), called.sender(2)
    busy.send(7, 1, b"four")
    busy.answer()

    later = called.enter(8, secret="another secret of 32 characters or more")
    with pytest.raises(Broken):
        idle.answer()
    with pytest.raises((Broken, StaleGeneration)):
        busy.told(8, 1, b"late")

    busy.close()
    idle.close()
    assert later.number == 8
    assert called.box.missing([(Label(Key(8, 1, "reduce"), 0, Span(0, 4)), 1)]) == [1]
    with pytest.raises(StaleGeneration):
        called.sender()


def test_sender_learns_why_it_is_sent_away_while_it_sends(called):
    """The mailbox ends under a message that waits for room; more of them are on their way."""
    sender = called.sender()
    for start in range(0, 400, 4):
        sender.send(7, 1, b"four", start=start)
    for _ in range(2):
        sender.answer()

    called.box.abort(GroupBroken("this rank has left its group"))

    with pytest.raises(GroupBroken):
        sender.answer()
    sender.close()


def test_key_alone_is_not_enough_with_tls(identified):
    """Rank 2 has got hold of rank 1's key; a stranger has, too; somebody shows it without TLS."""
    called, stranger = identified, Identity.new(now=ranks_on_loopback.NOW)
    trusts = called.group.members[0].certificate_pem

    def key() -> tuple[int, bytes]:
        return invitation(called.group, called.shown(), to=0, identity=called.identities[1])

    with pytest.raises(Forbidden, match="not that of rank 1"):
        BulkSender(*key(), identity=called.identities[2], trusts=trusts)
    with pytest.raises((Broken, OSError)):
        BulkSender(*key(), identity=stranger, trusts=trusts)
    with pytest.raises((Broken, OSError, AssertionError)):
        BulkSender(*key())
    assert (called.came(1), called.came(2)) == (None, None)


def test_rank_is_told_by_its_certificate_whatever_it_says(identified):
    own = identified.identities[2]
    shown = identified.shown(**{RANK_KEY: "1"})

    sent(identified.group, [(7, 1, b"four")], shown=shown, identity=own)

    assert (identified.came(1), identified.came(2)) == (None, b"four")


def test_certificate_outside_the_group_gets_no_key(identified):
    with pytest.raises(CoordinatorUnreachable):
        invitation(
            identified.group,
            identified.shown(),
            to=0,
            identity=Identity.new(now=ranks_on_loopback.NOW),
        )


@pytest.fixture
def identified(monkeypatch: pytest.MonkeyPatch) -> Iterator[Called]:
    monkeypatch.setattr(ranks_on_loopback, "Loopback", Called)
    with ranks_on_loopback.servers(3, is_tls=True, number=7) as made:
        assert isinstance(made, Called)
        made.enter()
        yield made


# Callers that show nothing


def test_caller_that_shows_no_key_is_cut_off_in_time(called, monkeypatch):
    monkeypatch.setattr(bulk, "OPENING_SECONDS", 0.1)
    with socket.create_connection(("127.0.0.1", called.servers[0].bulk_port), 10) as silent:
        silent.sendall(b"half a key")

        assert read_to_the_end(silent) in (b"", b"cut")

    called.sender().close()  # the control: who shows one gets in


@pytest.mark.parametrize("called", [False], indirect=True, ids=["plain"])
def test_refused_caller_that_goes_on_sending_is_cut_off_and_its_place_is_free(called, monkeypatch):
    monkeypatch.setattr(sockets, "DRAIN_SECONDS", 0.5)
    monkeypatch.setattr(bulk, "MAX_OPENING", 1)
    at = ("127.0.0.1", called.servers[0].bulk_port)
    with socket.create_connection(at, 10) as first:
        first.sendall(b"?" * sockets.KEY_BYTES)
        with pytest.raises(ConnectionError):
            trickle(first, seconds=10)

        called.sender().close()


def test_callers_without_a_key_are_few(called, monkeypatch):
    monkeypatch.setattr(bulk, "MAX_OPENING", 1)
    at = ("127.0.0.1", called.servers[0].bulk_port)
    with socket.create_connection(at, 10) as first, socket.create_connection(at, 10) as second:
        assert read_to_the_end(first) in (b"", b"cut")  # the one that has sat there for longer
        second.sendall(b"x")  # it is still open


def test_strangers_that_sit_in_all_places_keep_no_member_out(called, monkeypatch):
    monkeypatch.setattr(bulk, "MAX_OPENING", 4)
    at = ("127.0.0.1", called.servers[0].bulk_port)
    with ExitStack() as held:
        for _ in range(8):
            held.enter_context(socket.create_connection(at, 10))

        called.sender().close()  # within its own timeout, and long before theirs


def test_strangers_of_one_address_push_out_each_other_and_nobody_from_elsewhere(
    called, monkeypatch
):
    monkeypatch.setattr(bulk, "MAX_OPENING", 4)
    at = ("127.0.0.1", called.servers[0].bulk_port)
    with ExitStack() as held:
        elsewhere = held.enter_context(
            socket.create_connection(at, 10, source_address=("127.0.0.2", 0))
        )
        sitting = [held.enter_context(socket.create_connection(at, 10)) for _ in range(8)]

        assert read_to_the_end(sitting[0]) in (b"", b"cut")
        elsewhere.settimeout(0.2)
        with pytest.raises(TimeoutError):
            elsewhere.recv(1)  # it is still open


def trickle(connection: socket.socket, *, seconds: float) -> None:
    until = CLOCK.now() + seconds
    while CLOCK.now() < until:
        connection.sendall(b"more")
        CLOCK.sleep(0.05)


def read_to_the_end(connection: socket.socket) -> bytes:
    got = b""
    try:
        while more := connection.recv(4096):
            got += more
    except ConnectionError:
        return b"cut"
    return got if not got.startswith((b"\1", b"\x15")) else b""  # a refusal, or a TLS alert


def test_taken_port_is_refused_by_name():
    with ranks_on_loopback.servers(1) as made:
        taken = made.servers[0].bulk_port
        other = RankServer("127.0.0.1:0", bulk_port=taken)
        with pytest.raises(AddressUnreachable, match=f"bulk_port={taken}"):
            _ = other.bulk_port
        other.close()
