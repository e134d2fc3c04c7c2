"""How a rank calls another: the connection's limits, and who it takes for whom."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from atoll.collectives.exchange import CHUNK_BYTES
from atoll.collectives.grpc.trust import COMMON_NAME, Identity, RankGroup, channel_credentials
from atoll.wire import rpc

SERVICE = "atoll.Ranks"
REDIAL_SECONDS = 0.2
KEEPALIVE_MS = 10_000


def options() -> list[tuple[str, int]]:
    """Limits of every connection between ranks, on both sides."""
    return [
        ("grpc.max_receive_message_length", CHUNK_BYTES + (64 << 10)),
        ("grpc.max_send_message_length", CHUNK_BYTES + (64 << 10)),
        ("grpc.http2.max_frame_size", (16 << 20) - 1),  # fewer, larger frames: measured best
        ("grpc.http2.bdp_probe", 0),  # left to itself it doubles the memory
        ("grpc.http2.lookahead_bytes", 4 << 20),
        ("grpc.max_metadata_size", 16 << 10),
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        # A server takes pings for a flood, and ends the connection, unless it is told otherwise.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def channel(group: RankGroup, to: int, identity: Identity | None) -> grpc.Channel:
    """A connection to a peer, which shows exactly the certificate that the group says."""
    member = group.members[to]
    if identity is None:
        return grpc.insecure_channel(member.address, options=options())
    name = ("grpc.ssl_target_name_override", COMMON_NAME)
    credentials = channel_credentials(identity, member)
    return grpc.secure_channel(member.address, credentials, options=[*options(), name])


class Channels:
    """One kept connection from a rank to each peer, since there are many calls. Thread-safe.

    One that broke is dropped, so that the next call dials anew: gRPC itself would wait longer each
    time.
    """

    def __init__(self, group: RankGroup, identity: Identity | None) -> None:
        self._group = group
        self._identity = identity
        self._lock = threading.Lock()
        self._kept: dict[int, grpc.Channel] = {}

    def to(self, rank: int) -> grpc.Channel:
        with self._lock:
            if rank not in self._kept:
                self._kept[rank] = channel(self._group, rank, self._identity)
            return self._kept[rank]

    def drop(self, rank: int, broken: grpc.Channel) -> None:
        """Closes it, unless another one has taken its place."""
        with self._lock:
            if self._kept.get(rank) is not broken:
                return
            del self._kept[rank]
        broken.close()

    def close(self) -> None:
        with self._lock:
            kept = list(self._kept.values())
            self._kept.clear()
        for one in kept:
            one.close()


@contextmanager
def typed() -> Iterator[None]:
    """What a call raises, as the error that the peer refused with, or that it is not reached."""
    try:
        yield
    except grpc.RpcError as broken:
        raise rpc.error_of(broken) from None
