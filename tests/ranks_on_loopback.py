"""Groups of ranks on loopback: servers, certificates and members, closed in the right order."""

import datetime
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from atoll.clock import SystemClock
from atoll.collectives.grpc.member import RankMember
from atoll.collectives.grpc.server import RankServer
from atoll.collectives.grpc.trust import Identity, Member, RankGroup
from atoll.collectives.peers import Source

SECRET = "a secret of the group, 32 characters or more"
NOW = datetime.datetime.now(datetime.UTC)


class Loopback:
    """Servers of ranks, and the group that they are in."""

    def __init__(self, stack: ExitStack, size: int, *, is_tls: bool, number: int = 1) -> None:
        self.identities = [Identity.new(now=NOW) if is_tls else None for _ in range(size)]
        self.servers = [RankServer("127.0.0.1:0", identity=one) for one in self.identities]
        for server in self.servers:
            stack.callback(server.close)
        self.group = self.group_at([server.address for server in self.servers], number=number)

    def group_at(
        self, addresses: Sequence[str], *, number: int = 1, secret: str = SECRET
    ) -> RankGroup:
        """The same members, dialled elsewhere."""
        members = (
            Member(f"w{k}", address, one.certificate_pem if one else b"")
            for k, (address, one) in enumerate(zip(addresses, self.identities, strict=True))
        )
        return RankGroup(number, tuple(members), secret)

    def member(self, rank: int, *, group: RankGroup | None = None, **options: Any) -> RankMember:
        return RankMember(
            group or self.group,
            rank,
            self.servers[rank],
            clock=SystemClock(),
            identity=self.identities[rank],
            **options,
        )


@contextmanager
def servers(size: int, *, is_tls: bool = False, number: int = 1) -> Iterator[Loopback]:
    """Servers without members, until the block ends."""
    with ExitStack() as stack:
        yield Loopback(stack, size, is_tls=is_tls, number=number)


@contextmanager
def ranks(
    size: int,
    *,
    is_tls: bool = False,
    source: Callable[[int], Source | None] = lambda _: None,
    **options: Any,
) -> Iterator[list[RankMember]]:
    """All members of a group, until the block ends."""
    with servers(size, is_tls=is_tls) as made, ExitStack() as stack:
        yield [
            stack.enter_context(made.member(rank, source=source(rank), **options))
            for rank in range(size)
        ]
