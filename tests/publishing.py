"""Gather runs by hand: a coordinator with buckets, and islands that publish and announce."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from atoll.blobs.bucket import Bucket, Tag
from atoll.blobs.memory_bucket import MemoryBucket
from atoll.clock import ManualClock
from atoll.coordinator import handlers
from atoll.coordinator.handlers import Arrival
from atoll.errors import AtollError
from atoll.gather import publish
from atoll.gather import statement as statements
from atoll.gather.keys import SecretKey
from atoll.gather.statement import Statement
from atoll.layout import Layout
from atoll.protocol import gather
from atoll.protocol.gather import AnnounceReply, AnnounceRequest, WindowReply, WindowRequest
from atoll.protocol.messages import RegisterRequest
from atoll.wire import frame as frames
from tests.clusters import SMALL, Cluster, Frame, HandIsland

FOREVER = 1e12
SETTINGS: dict[str, Any] = {
    "strategy": "gather",
    "upload.codec": "topk",
    "outer.optimizer": "sgd",
    "outer.lr": 0.7,
    "gather.buckets": {"main": {"url": "memory:"}, "other": {"url": "memory:"}},
}


class Troubled:
    """A bucket in memory that answers as the test says."""

    def __init__(self, clock: ManualClock) -> None:
        self.inner = MemoryBucket(clock)
        self.clock = clock
        self.errors: list[AtollError] = []  # raised by the next looks, one each
        self.breaks: dict[str, list[tuple[int, AtollError]]] = {}  # by folder: after so many bytes
        self.seconds = 0.0  # that every piece takes
        self.piece_bytes = 1 << 30
        self.sent: dict[str, int] = {}  # bytes by key
        self.looked: list[str] = []

    def use(self, clock: ManualClock) -> None:
        """Goes by this clock from now on."""
        self.clock = clock
        self.inner.__dict__["_clock"] = clock

    def look(self, key: str, *, deadline: float) -> Tag | None:
        self.looked.append(key)
        if self.errors:
            raise self.errors.pop(0)
        return self.inner.look(key, deadline=deadline)

    def pieces(
        self, key: str, tag: Tag, start: int, stop: int, *, deadline: float
    ) -> Iterator[memoryview]:
        for name, breaks in self.breaks.items():
            if f"/{name}/" in key and breaks:
                count, error = breaks.pop(0)
                yield from self._cut(key, tag, start, min(stop, start + count), deadline=deadline)
                raise error
        yield from self._cut(key, tag, start, stop, deadline=deadline)

    def _cut(
        self, key: str, tag: Tag, start: int, stop: int, *, deadline: float
    ) -> Iterator[memoryview]:
        for whole in self.inner.pieces(key, tag, start, stop, deadline=deadline):
            for begin in range(0, len(whole), self.piece_bytes):
                self.clock.advance(seconds=self.seconds)
                piece = whole[begin : begin + self.piece_bytes]
                self.sent[key] = self.sent.get(key, 0) + len(piece)
                yield piece

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class GatherCluster(Cluster):
    """A gather run's coordinator; its buckets outlive it."""

    def __init__(
        self, home: Path, settings: Mapping[str, Any] | None = None, *, layout: Layout = SMALL
    ) -> None:
        clock = ManualClock()
        self.held = {"main": Troubled(clock), "other": Troubled(clock)}
        super().__init__(home, {**SETTINGS, **(settings or {})}, layout=layout)

    def _buckets(self) -> Mapping[str, Bucket]:
        for bucket in self.held.values():
            bucket.use(self.clock)
        return self.held

    def island(self, name: str, *, key: str | None = None) -> "PublishingIsland":
        return PublishingIsland(self, name, key=key).join()

    def islands(self, names: str) -> list["PublishingIsland"]:
        """Islands that have joined, one for each letter, in a round that gives rows to all."""
        made = [self.island(name) for name in names]
        if len(names) > self.manifest.membership.min_workers:
            for island in made[: self.manifest.membership.min_workers]:
                island.contribute_by_pull()
            assert self.settle() == 1
        return made

    def reasons(self, round_number: int | None = None) -> dict[str, str]:
        """By worker, why the open round goes on without it."""
        number = self.version + 1 if round_number is None else round_number
        return {skip.worker_id: skip.reason for skip in self.coordinator.rounds.skips(number)}


class PublishingIsland(HandIsland):
    """An island made by hand that publishes what it hands in."""

    bucket = "main"

    def __init__(self, cluster: Cluster, name: str, *, key: str | None = None) -> None:
        super().__init__(cluster, name, key=key)
        self.signing = SecretKey(hashlib.sha256(b"signs " + name.encode()).digest())

    @property
    def place(self) -> Troubled:
        assert isinstance(self.cluster, GatherCluster)
        return self.cluster.held[self.bucket]

    def register_request(self, **changes: Any) -> RegisterRequest:
        publishes = {"key": self.signing.public.hex, "bucket": self.bucket}
        return super().register_request(**{"publishes": publishes, **changes})

    def statement(self, sent: Frame, **changes: Any) -> Statement:
        """What an honest island states of a frame, with `changes`."""
        header = frames.parse_preamble(sent.preamble)[0]
        right = Statement(
            run_id=header.run_id,
            manifest_sha256=header.manifest_sha256,
            uid=self.name,
            window=header.round,
            base_digest=header.base_digest or "",
            sample_digest=gather.sample_digest(header.ranges),
            nbytes=sent.nbytes,
            sha256=sent.sha256,
        )
        return replace(right, **changes)

    def key_of(self, sent: Frame) -> str:
        prefix = gather.prefix_of(self.identity.run_id, self.name)
        return publish.frame_key(prefix, sent.sha256)

    def publish(self, sent: Frame) -> Frame:
        """Puts an honest frame and its statement into the bucket."""
        publish.publish(
            self.place.inner,
            gather.prefix_of(self.identity.run_id, self.name),
            sent.data,
            self.statement(sent),
            self.signing,
            keep=8,
            deadline=FOREVER,
        )
        return sent

    def publish_freely(self, sent: Frame) -> Frame:
        """Puts a frame alone, as an island that keeps to no rule does."""
        self.place.inner.put(self.key_of(sent), sent.data)
        return sent

    def announcement(
        self, sent: Frame, *, document: bytes | None = None, **changes: Any
    ) -> AnnounceRequest:
        if document is None:
            document = statements.signed(self.statement(sent), self.signing)
        made = AnnounceRequest.of(
            self.identity,
            preamble=sent.preamble,
            sha256=sent.sha256,
            nbytes=sent.nbytes,
            statement=b"",
        )
        said = document.decode("latin-1")
        return AnnounceRequest.model_validate({**made.model_dump(), "statement": said, **changes})

    def announce(self, sent: Frame, **changes: Any) -> AnnounceReply:
        """Says what lies in the bucket, as it comes over any transport."""
        made = self.announcement(sent, **changes)
        return handlers.answer(self.coordinator, made, Arrival())

    def contribute_by_pull(self) -> AnnounceReply:
        """Trains the open round by hand, publishes and announces it."""
        return self.announce(self.publish(self.frame()))

    def window(self, round_number: int) -> WindowReply:
        asked = WindowRequest(identity=self.identity, round=round_number)
        return handlers.answer(self.coordinator, asked, Arrival())

    def join(self) -> Self:
        super().join()
        return self
