"""The S3 server of a benchmark, the worlds that are published there, and proxies before it."""

import math
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from types import TracebackType
from typing import Any, Self

from atoll.blobs.s3_bucket import S3Bucket
from benchmarks.gather_group import Found
from benchmarks.gather_world import CLOCK, World, access
from tests.s3_proxy import S3Proxy, broken_bytes, bytes_twice, proxied, sent_bytes
from tests.servers import BUCKET, Servers


class Bench:
    """One server; what is published stays for all parts."""

    def __init__(self, servers: Servers, *, repeats: int) -> None:
        self.servers, self.repeats = servers, repeats
        self._stack = ExitStack()
        self._published: dict[tuple[float, int], tuple[World, int]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def url(self) -> str:
        return self.servers.s3().url

    def proxy(self) -> S3Proxy:
        """A proxy for the rest of the benchmark."""
        return self._stack.enter_context(proxied(self.url))

    def world(self, *, peers: int, megabytes: float, **more: Any) -> World:
        """A world whose objects are published."""
        return self._find(peers, megabytes, **more)[0]

    def object_bytes(self, *, peers: int, megabytes: float) -> int:
        """Of one object of that world."""
        return self._find(peers, megabytes)[1]

    def _find(self, peers: int, megabytes: float, **more: Any) -> tuple[World, int]:
        known = (megabytes, peers)
        if known not in self._published:
            made = World.of(folder=f"b{len(self._published)}", peers=peers, megabytes=megabytes)
            with S3Bucket(BUCKET, access(self.url), CLOCK) as bucket:
                self._published[known] = made, made.publish(bucket)
        made, nbytes = self._published[known]
        return replace(made, **more), nbytes

    def warm(self) -> World:
        """A tiny world, for whatever loads late."""
        return self.world(peers=2, megabytes=0.02)


@dataclass(frozen=True)
class Counted:
    """What a proxy counted of frames, against what had to come."""

    sent_bytes: int
    needed_bytes: int
    broken_bytes: int  # of these sent, in pieces that broke
    twice_bytes: int  # that came again though their piece had not broken

    @classmethod
    def of(cls, proxy: S3Proxy, found: Found, needed: int) -> Self:
        """Of all repeats, each by itself; `needed` bytes have to come in each."""
        begins = [min(one["began"] for one in repeat) for repeat in zip(*found, strict=True)]
        cuts = [proxy.between(a, b) for a, b in pairwise([*begins, math.inf])]
        return cls(
            sum(map(sent_bytes, cuts)),
            needed * len(cuts),
            sum(map(broken_bytes, cuts)),
            sum(map(bytes_twice, cuts)),
        )
