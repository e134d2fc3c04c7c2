"""Who may send to a rank: members of its present group, each as itself, and nobody else."""

import datetime
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import chain
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch

from atoll.clock import SystemClock
from atoll.collectives.base import Key, Label
from atoll.collectives.grpc import messages
from atoll.collectives.grpc import server as rank_server
from atoll.collectives.grpc.dial import SERVICE
from atoll.collectives.grpc.member import RankMember
from atoll.collectives.grpc.server import RankServer
from atoll.collectives.grpc.trust import (
    COMMON_NAME,
    GROUP_KEY,
    RANK_KEY,
    SECRET_KEY,
    Identity,
    Member,
    RankGroup,
)
from atoll.collectives.mailbox import Mailbox
from atoll.errors import (
    AddressUnreachable,
    ConfigError,
    CoordinatorUnreachable,
    Forbidden,
    MissingRanks,
    NotReady,
    ProtocolError,
    StaleGeneration,
)
from atoll.layout import Span
from atoll.wire import rpc

CLOCK = SystemClock()
NOW = datetime.datetime.now(datetime.UTC)
SECRET = "a secret of the group, 32 characters or more"


def label(group: int = 7, step: int = 1) -> Label:
    return Label(Key(group=group, step=step, op="reduce"), 0, Span(0, 4))


MESSAGE = messages.packed(label(), memoryview(b"four"))


class Called:
    """A rank that is called: its server, and what has come to its mailbox."""

    def __init__(self, *identities: Identity, number: int = 7) -> None:
        own = identities[0] if identities else None
        self.server = RankServer("127.0.0.1:0", identity=own)
        self.box = Mailbox(group=number, rank=0, size=3, clock=CLOCK, limit_bytes=1 << 20)
        pems = [one.certificate_pem for one in identities] or [b""] * 3
        members = [Member(f"w{k}", self.server.address, pem) for k, pem in enumerate(pems)]
        self.group = RankGroup(number, tuple(members), SECRET)

    def came(self, sender: int) -> bytes | None:
        """What lies here of that sender."""
        try:
            return bytes(self.box.take(label(), sender, nbytes=4, until=CLOCK.now()))
        except MissingRanks:
            return None

    def is_empty(self) -> bool:
        return [self.came(sender) for sender in (1, 2)] == [None, None]


@pytest.fixture
def called() -> Iterator[Called]:
    made = Called()
    made.server.enter(made.group, made.box)
    yield made
    made.server.close()


def metadata(**changes: str) -> tuple[tuple[str, str], ...]:
    shown = {GROUP_KEY: "7", RANK_KEY: "1", SECRET_KEY: SECRET, **changes}
    return tuple(shown.items())


def send(
    address: str,
    *parts: bytes,
    then: Iterable[bytes] = (),
    shown: tuple[tuple[str, str], ...] = metadata(),
    credentials: grpc.ChannelCredentials | None = None,
) -> int:
    """How many messages were taken; raises what the rank refused with."""
    options = [("grpc.ssl_target_name_override", COMMON_NAME)]
    if credentials is None:
        channel = grpc.insecure_channel(address)
    else:
        channel = grpc.secure_channel(address, credentials, options=options)
    with channel:
        deliver: Any = channel.stream_stream(f"/{SERVICE}/Deliver")
        try:
            return sum(map(ord, deliver(chain(parts, then), metadata=shown, timeout=20)))
        except grpc.RpcError as error:
            raise rpc.error_of(error) from None


# Without TLS


def test_member_is_let_in_as_the_rank_it_shows(called):
    assert send(called.server.address, MESSAGE) == 1

    assert called.came(1) == b"four"


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({SECRET_KEY: "b" * 32}, Forbidden),
        ({SECRET_KEY: ""}, Forbidden),
        ({SECRET_KEY: "b" * 32, GROUP_KEY: "6"}, StaleGeneration),  # a former member
        ({RANK_KEY: "3"}, Forbidden),
        ({RANK_KEY: "-1"}, Forbidden),
        ({RANK_KEY: ""}, Forbidden),
        ({RANK_KEY: "0"}, Forbidden),  # the called rank itself
    ],
    ids=str,
)
def test_stranger_is_refused_and_nothing_changes(called, changes, refusal):
    with pytest.raises(refusal):
        send(called.server.address, MESSAGE, shown=metadata(**changes))

    assert called.is_empty()


@pytest.mark.parametrize(
    ("part", "refusal"),
    [
        (b"", ProtocolError),
        (b"short", ProtocolError),
        (MESSAGE[:-1], ProtocolError),  # shifted, so that the numbers mean something else
        (messages.packed(label(group=6), memoryview(b"four")), StaleGeneration),
    ],
)
def test_message_that_no_member_writes_is_refused_and_nothing_changes(called, part, refusal):
    with pytest.raises((refusal, StaleGeneration)):
        send(called.server.address, part)

    assert called.is_empty()


def test_same_message_again_is_answered_and_counted_once(called):
    assert send(called.server.address, MESSAGE, MESSAGE) == 2
    assert send(called.server.address, MESSAGE) == 1

    assert called.came(1) == b"four"
    assert called.is_empty()


def test_rank_without_a_group_lets_nobody_in(called):
    called.server.leave()

    with pytest.raises(NotReady):
        send(called.server.address, MESSAGE)


def test_rank_that_still_measures_asks_members_of_the_group_to_call_again(called):
    """A group has its candidate's number and another secret, which some learn before others."""
    candidate = RankGroup(called.group.number, called.group.members, "the candidate's " * 2)
    called.server.enter(candidate)

    with pytest.raises(NotReady, match="only measures here as yet"):
        send(called.server.address, MESSAGE)
    called.server.enter(called.group, called.box)

    assert called.is_empty()
    assert send(called.server.address, MESSAGE) == 1


def test_stream_does_not_outlive_its_group(called):
    """The first message is taken; then the rank is in another group, with other ranks."""
    later = RankGroup(8, called.group.members, "another secret of 32 characters or more")
    box = Mailbox(group=8, rank=0, size=3, clock=CLOCK, limit_bytes=1 << 20)

    def later_parts() -> Iterator[bytes]:
        assert called.box.take(label(), 1, nbytes=4, until=CLOCK.now() + 10)
        called.server.enter(later, box)
        yield messages.packed(label(group=8), memoryview(b"late"))

    with pytest.raises(StaleGeneration) as refused:
        send(called.server.address, MESSAGE, then=later_parts())

    assert refused.value.present == 8
    with pytest.raises(MissingRanks):
        box.take(label(group=8), 1, nbytes=4, until=CLOCK.now())


def test_taken_address_is_refused_by_name(called):
    with pytest.raises(AddressUnreachable, match="listen="):
        RankServer(called.server.address)


@pytest.mark.parametrize(
    ("members", "secret"),
    [
        ((Member("a", "x:1"), Member("a", "x:2")), SECRET),
        ((Member("a", "x:1", b"pem"), Member("b", "x:2", b"pem")), SECRET),
        ((Member("a", "x:1"),), "short"),
    ],
)
def test_group_in_which_ranks_cannot_be_told_apart_is_refused(members, secret):
    with pytest.raises(ConfigError):
        RankGroup(1, members, secret)


# With TLS


@pytest.fixture(scope="module")
def identities() -> list[Identity]:
    return [Identity.new(now=NOW) for _ in range(4)]


@pytest.fixture
def secured(identities) -> Iterator[Called]:
    made = Called(*identities[:3])
    made.server.enter(made.group, made.box)
    yield made
    made.server.close()


def shows(identity: Identity, to: Identity) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        to.certificate_pem, identity.key_pem, identity.certificate_pem
    )


def test_sender_is_whose_certificate_it_is_whatever_it_says(secured, identities):
    credentials = shows(identities[2], identities[0])

    send(secured.server.address, MESSAGE, credentials=credentials)

    assert (secured.came(1), secured.came(2)) == (None, b"four")


def test_certificate_outside_the_group_is_refused_in_the_handshake(secured, identities):
    with pytest.raises(CoordinatorUnreachable):
        send(secured.server.address, MESSAGE, credentials=shows(identities[3], identities[0]))

    assert secured.is_empty()


def test_caller_without_a_certificate_or_without_tls_is_refused(secured, identities):
    bare = grpc.ssl_channel_credentials(identities[0].certificate_pem)

    for credentials in (bare, None):
        with pytest.raises(CoordinatorUnreachable):
            send(secured.server.address, MESSAGE, credentials=credentials)

    assert secured.is_empty()


def test_certificate_alone_is_not_enough(secured, identities):
    with pytest.raises(Forbidden):
        send(
            secured.server.address,
            MESSAGE,
            shown=metadata(**{SECRET_KEY: "b" * 32}),
            credentials=shows(identities[1], identities[0]),
        )

    assert secured.is_empty()


def test_caller_takes_no_other_server_for_the_rank(secured, identities):
    """The address answers with a certificate that is not the one of the group."""
    with pytest.raises(CoordinatorUnreachable):
        send(secured.server.address, MESSAGE, credentials=shows(identities[1], identities[3]))


def test_former_member_is_refused_once_the_group_has_changed(secured, identities):
    address, group = secured.server.address, secured.group
    left = RankGroup(8, group.members[:2], "another secret of 32 characters or more")
    secured.server.enter(left, secured.box)

    with pytest.raises((CoordinatorUnreachable, StaleGeneration, Forbidden)):
        send(address, MESSAGE, credentials=shows(identities[2], identities[0]))

    assert secured.is_empty()


def test_change_of_trust_waits_for_handshakes_that_have_just_asked(
    secured, identities, monkeypatch
):
    """gRPC frees what a handshake that asked just before may be about to use, and crashes.

    Some 2,500 changes among handshakes were enough for that without the wait.
    """
    waited: list[float] = []
    stopped = SimpleNamespace(monotonic=lambda: 100.0, sleep=waited.append)
    monkeypatch.setattr(rank_server, "time", stopped)
    credentials = shows(identities[1], identities[0])
    address, members = secured.server.address, secured.group.members

    send(address, MESSAGE, credentials=credentials)
    send(address, MESSAGE, credentials=credentials)
    secured.server.enter(RankGroup(8, members[:2], "another secret of 32 characters or more"))
    with pytest.raises((StaleGeneration, Forbidden)):
        send(address, MESSAGE, credentials=credentials)

    assert waited == [0.0, pytest.approx(rank_server.BEGINNING_SECONDS)]


# Streams that break


def test_broken_stream_is_dialled_again_and_every_message_counts_once():
    """Rank 1's server goes away while rank 0 sends to it, and comes back at the same address."""
    with ExitStack() as stack:
        servers = [RankServer("127.0.0.1:0") for _ in range(2)]
        members = tuple(Member(f"w{k}", one.address) for k, one in enumerate(servers))
        group = RankGroup(1, members, SECRET)
        options: dict[str, Any] = {"clock": CLOCK, "chunk_bytes": 4_096, "way": "direct"}
        first = stack.enter_context(RankMember(group, 0, servers[0], **options))
        stack.callback(servers[0].close)
        key = Key(group=1, step=1, op="reduce")
        begun = first.all_reduce(key, own := torch.arange(100_000.0))
        # Nobody is in a group there: what is sent is refused for now. Then it is gone for good.
        servers[1].close()
        again = RankServer(servers[1].address)
        second = stack.enter_context(RankMember(group, 1, again, **options))
        stack.callback(again.close)

        second.all_reduce(key, other := torch.arange(100_000.0)).wait()
        begun.wait()

    assert torch.equal(own, 2 * torch.arange(100_000.0))
    assert torch.equal(other, own)
