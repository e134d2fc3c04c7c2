"""Whole windows of a small model: published frames, groups of ranks in threads, an archive."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from atoll.blobs.bucket import Bucket
from atoll.blobs.memory_bucket import MemoryBucket
from atoll.clock import SystemClock
from atoll.codecs.topk.codec import TopK
from atoll.collectives.base import Collectives
from atoll.errors import AtollError
from atoll.gather.archive import Archive
from atoll.gather.consume import Settings
from atoll.gather.errand import Pace
from atoll.gather.keys import SecretKey
from atoll.gather.peers import Peer, PeerList
from atoll.gather.publish import publish
from atoll.gather.replica import Replica
from atoll.gather.result import Merged
from atoll.gather.statement import Statement
from atoll.gather.terms import Terms
from atoll.gather.window import Window
from atoll.optim.sgd import Sgd
from atoll.sums import digest
from atoll.wire.header import Told
from tests import gather_reference as naive
from tests import gathers, rank_groups
from tests.frames import framed, ranges

CLOCK = SystemClock()
LAYOUT = gathers.LAYOUT
RUN_ID, MANIFEST = "run-1", "a" * 64
EMITTER = SecretKey(bytes(range(32)))
PRIMARIES, RESERVES = ("10", "7", "8", "9"), ("r0", "r1")
SEEDS = {uid: 4 + k for k, uid in enumerate((*PRIMARIES, *RESERVES))}
WEIGHTS = {uid: 1 + k % 3 for k, uid in enumerate((*PRIMARIES, *RESERVES))}
PACE = Pace(turn_seconds=5.0, patience_seconds=0.05)  # the machine may be busy; nothing is slow


def secret(uid: str) -> SecretKey:
    return SecretKey(hashlib.sha256(uid.encode()).digest())


def payload(uid: str, window: int) -> bytes:
    return gathers.payload(SEEDS[uid] + 20 * window, scale=2.0 ** (SEEDS[uid] % 5 - 8))


def root(flat: Tensor) -> str:
    return digest.digest(LAYOUT, flat).root


def put(bucket: Bucket, uid: str, window: int, base: str, data: bytes | None = None) -> None:
    """Publishes a peer's frame of a window."""
    sent = payload(uid, window) if data is None else data
    header = Told(
        kind="contribution",
        run_id=RUN_ID,
        manifest_sha256=MANIFEST,
        round=window,
        worker_id=uid,
        incarnation=1,
        base_digest=base,
        weight=1,
        rows=4,
        ranges=ranges((0, 4)),
    ).header(LAYOUT, TopK())
    frame = framed(header.to_json(), sent)
    told = Statement(
        run_id=RUN_ID,
        manifest_sha256=MANIFEST,
        uid=uid,
        window=window,
        base_digest=base,
        sample_digest="5" * 64,
        nbytes=len(frame),
        sha256=hashlib.sha256(frame).hexdigest(),
    )
    publish(bucket, f"peers/{uid}", frame, told, secret(uid), keep=9, deadline=CLOCK.now() + 30)


def terms(**changes: Any) -> Terms:
    def peer(uid: str) -> Peer:
        return Peer(uid, secret(uid).public, "main", f"peers/{uid}")

    made = Terms(
        run_id=RUN_ID,
        manifest_sha256=MANIFEST,
        layout=LAYOUT,
        peers=PeerList(tuple(map(peer, PRIMARIES)), tuple(map(peer, RESERVES))),
        optimizer=Sgd(gathers.LR),
        seconds=30.0,
        memory_bytes=64 << 20,
        weights=WEIGHTS,
        pace=PACE,
    )
    return replace(made, **changes)


def archive(bucket: Bucket, **changes: Any) -> Archive:
    made = Archive(
        bucket=bucket,
        prefix="archive",
        key=EMITTER.public,
        layout=LAYOUT,
        clock=CLOCK,
        run_id=RUN_ID,
        manifest_sha256=MANIFEST,
    )
    return replace(made, **changes)


@dataclass
class World:
    """A bucket with everything in it, and the model that a group holds between windows."""

    home: Path
    bucket: Bucket = field(default_factory=lambda: MemoryBucket(CLOCK))
    prefix: str = "archive"
    master: Tensor = field(default_factory=gathers.start)
    window: int = 0
    prev: str = "0" * 64

    @property
    def digest(self) -> str:
        return root(self.master)

    def publish(self, *uids: str) -> None:
        for uid in uids:
            put(self.bucket, uid, self.window, self.digest)

    def run(
        self,
        size: int,
        *,
        life: str = "a",
        terms_of: Callable[[int], Terms] = lambda _: terms(),
        buckets_of: Callable[[int, Bucket], Bucket] = lambda _, bucket: bucket,
        archive_of: Callable[[Bucket], Bucket] = lambda bucket: bucket,
        archive_has: Mapping[str, Any] = MappingProxyType({}),
        timeout_seconds: float = 60.0,
        gone: int | None = None,
        after: Callable[[Collectives, Merged], Any] = lambda _, merged: merged,
    ) -> list[Any]:
        """What each rank got or raised; the model moves on where none raised.

        `after` is given each rank's result while the group lives; what it makes of it is given.
        """
        master = self.master.clone()
        replicas: dict[int, Replica] = {}

        def work(ranks: Collectives) -> Any:
            rank = ranks.rank
            if rank == gone:
                return None
            own = terms().owners(size)[rank].of(master)
            replicas[rank] = Replica(
                master=own, window=self.window, digest=self.digest, prev=self.prev
            )
            window = Window(
                ranks=ranks,
                buckets={"main": buckets_of(rank, self.bucket)},
                clock=CLOCK,
                directory=self.home / life / f"{size}-{rank}",
                terms=terms_of(rank),
                replica=replicas[rank],
                archive=archive(archive_of(self.bucket), prefix=self.prefix, **archive_has),
                key=EMITTER if rank == 0 else None,
            )
            try:
                return after(ranks, window.run(self.window))
            except AtollError as exc:
                return exc

        found = rank_groups.threads(
            size, "direct", work, chunk_bytes=1 << 16, timeout_seconds=timeout_seconds
        )
        self.moved = master
        if all(isinstance(one, Merged) for one in found):
            first = replicas[0]
            assert {(r.window, r.digest, r.prev) for r in replicas.values()} == {
                (first.window, first.digest, first.prev)
            }
            assert first.digest == root(master)
            self.master, self.window, self.prev = master, first.window, first.prev
        return found

    def expected(self, uids: Mapping[str, bytes] | tuple[str, ...]) -> Tensor:
        """What the reference makes of these peers."""
        payloads = uids if isinstance(uids, Mapping) else {u: payload(u, self.window) for u in uids}
        given = {uid: naive.Peer(data, WEIGHTS[uid]) for uid, data in payloads.items()}
        return gathers.expected(given, self.master)[1]


def settings(**changes: Any) -> Settings:
    return Settings(**changes)


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))
