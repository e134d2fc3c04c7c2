"""A rank's door between processes: its own server, certificate and streams to the others."""

import datetime

from atoll.clock import Clock
from atoll.collectives.grpc.member import RankMember
from atoll.collectives.grpc.pings import measured
from atoll.collectives.grpc.server import RankServer
from atoll.collectives.grpc.trust import Identity, Member, RankGroup
from atoll.collectives.peers import Desk, Peers, Pings, Source
from atoll.collectives.runners import Threaded
from atoll.errors import ConfigError
from atoll.island.sharded.host import Endpoint
from atoll.protocol.manifest import ShardedSettings
from atoll.protocol.sharded import GroupReply, Launch
from atoll.traffic import Traffic

EVERYWHERE = ("0.0.0.0", "[::]", "::")
DEFAULT_LISTEN = "0.0.0.0:0"


class GrpcHost:
    """Fulfils `host.Host` with a `RankServer`; with `secure` ranks show each other certificates.

    `number` is that of this process where several of a machine are given the same addresses: their
    ports follow each other.
    """

    outlives_groups = True
    launch: Launch | None = None

    def __init__(
        self,
        *,
        listen: str | None,
        advertise: str | None,
        secure: bool,
        clock: Clock,
        number: int = 0,
    ) -> None:
        host, port = _place("listen", listen or DEFAULT_LISTEN, number=number)
        told_host, told_port = (
            _place("advertise", advertise, number=number) if advertise else (None, 0)
        )
        self._clock = clock
        self.traffic = Traffic()
        now = datetime.datetime.fromtimestamp(clock.wall(), datetime.UTC)
        self._identity = Identity.new(now=now) if secure else None
        self._server = RankServer(f"{host}:{port}", identity=self._identity)
        bound = int(self._server.address.rpartition(":")[2])
        if told_host is None and host not in EVERYWHERE:
            told_host = host
        certificate = "" if self._identity is None else self._identity.certificate_pem.decode()
        self.endpoint = Endpoint(_bare(told_host), told_port or bound, certificate)

    def measure(self, candidate: GroupReply, rank: int) -> Pings:
        group = _group(candidate)
        self._server.enter(group)
        return measured(group, rank, identity=self._identity, clock=self._clock)

    def enter(
        self,
        formed: GroupReply,
        rank: int,
        *,
        source: Source,
        desk: Desk | None = None,
        settings: ShardedSettings,
    ) -> Peers:
        return RankMember(
            _group(formed),
            rank,
            self._server,
            clock=self._clock,
            identity=self._identity,
            way=settings.exchange,
            timeout_seconds=settings.deadline_seconds,
            source=source,
            desk=desk,
            bulk=settings.bulk,
            traffic=self.traffic,
        )

    def lane(self, name: str) -> Threaded:
        return Threaded(name)

    def close(self) -> None:
        self._server.close()


def _group(told: GroupReply) -> RankGroup:
    members = tuple(Member(m.worker_id, m.address, m.certificate.encode()) for m in told.members)
    return RankGroup(told.group, members, told.secret)


def _place(name: str, text: str, *, number: int) -> tuple[str, int]:
    """HOST:PORT, or HOST alone; ConfigError with the option's name for anything else."""
    host, colon, digits = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, digits = text, "0"
    port = int(digits) if digits.isdecimal() else -1
    port += number if port else 0
    wrong = not host or not digits.isdecimal() or port > 65535
    if wrong or (":" in host and not host.startswith("[")):
        raise ConfigError(
            f"--{name} {text!r} is not an address; write HOST:PORT, or HOST for any free port, "
            f"with brackets around an IPv6 address"
        )
    return host, port


def _bare(host: str | None) -> str | None:
    return None if host is None else host.strip("[]")
