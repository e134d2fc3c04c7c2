"""The windows that `benchmarks.gather` measures: peers of a size, their objects, what ranks expect.

All weights begin at 1. A payload repeats one random tile, for chunks say nothing about their place;
so objects of any size are made in no time, and cost as much to check, compare and apply as others.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from typing import Self

import numpy as np
import torch

from atoll.blobs.access import S3Access
from atoll.blobs.bucket import Bucket
from atoll.clock import SystemClock
from atoll.codecs.topk.chunks import CHUNK, chunk_bytes
from atoll.codecs.topk.codec import TopK
from atoll.compiled.base import FULL_TILE_ELEMENTS
from atoll.gather.archive import Archive
from atoll.gather.keys import SecretKey
from atoll.gather.peers import Peer, PeerList
from atoll.gather.publish import publish
from atoll.gather.statement import Statement
from atoll.gather.terms import Terms
from atoll.layout import Layout
from atoll.optim.sgd import Sgd
from atoll.sums import digest
from atoll.wire.frame import FrameWriter
from atoll.wire.header import Told
from tests import servers

RUN_ID, MANIFEST = "benchmark", "a" * 64
EMITTER = SecretKey(bytes(range(32)))
CLOCK = SystemClock()
OUTER_LR = 0.4
TENSORS = 30


@dataclass(frozen=True, kw_only=True)
class World:
    """Peers of one size below one folder of the bucket; ranks get it as JSON."""

    folder: str
    peers: int
    megabytes: float  # of one payload
    budget_mb: int = 256
    seconds: float = 100.0
    asked: int = 0  # the first so many of them; 0: all
    without_every: int = 0  # every so many-th peer is not asked
    window: int = 0
    base_digest: str = ""  # of the weights before the window; `of` computes it

    @classmethod
    def of(cls, **table: object) -> Self:
        """With the digest of its weights."""
        made = cls(**table)  # type: ignore[arg-type] # a JSON edge
        root = digest.digest(made.layout, torch.ones(made.layout.size)).root
        return cls(**{**asdict(made), "base_digest": root})

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def uids(self) -> list[str]:
        left_out = range(0, self.peers, self.without_every) if self.without_every else ()
        asked = range(self.asked or self.peers)
        return [f"u{k:03d}" for k in asked if k not in left_out]

    @cached_property
    def layout(self) -> Layout:
        """Thirty tensors, whose edges are no tile's."""
        elements = int(self.megabytes * 1e6) // chunk_bytes(CHUNK) * CHUNK
        edges = [elements * k // TENSORS for k in range(TENSORS + 1)]
        sizes = [stop - start for start, stop in pairwise(edges)]
        return Layout.of((f"p{k}", (size,), "float32") for k, size in enumerate(sizes))

    def terms(self) -> Terms:
        return Terms(
            run_id=RUN_ID,
            manifest_sha256=MANIFEST,
            layout=self.layout,
            peers=PeerList(tuple(map(self.peer, self.uids)), ()),
            optimizer=Sgd(OUTER_LR),
            seconds=self.seconds,
            memory_bytes=self.budget_mb << 20,
        )

    def peer(self, uid: str) -> Peer:
        return Peer(uid, secret(uid).public, "main", self.prefix(uid))

    def prefix(self, uid: str) -> str:
        return f"{self.folder}/{uid}"

    def archive(self, bucket: Bucket, name: str) -> Archive:
        return Archive(
            bucket=bucket,
            prefix=f"{self.folder}/{name}",
            key=EMITTER.public,
            layout=self.layout,
            clock=CLOCK,
            run_id=RUN_ID,
            manifest_sha256=MANIFEST,
        )

    def frame(self, uid: str, *, seed: int) -> bytes:
        """What a peer publishes."""
        data = bytearray()
        header = Told(
            kind="contribution",
            run_id=RUN_ID,
            manifest_sha256=MANIFEST,
            round=self.window,
            worker_id=uid,
            incarnation=1,
            base_digest=self.base_digest,
            weight=1,
        ).header(self.layout, TopK())
        writer = FrameWriter(header, data.extend)
        writer.payload(payload(self.layout.size, seed=seed))
        writer.finish()
        return bytes(data)

    def statement(self, uid: str, frame: bytes) -> Statement:
        return Statement(
            run_id=RUN_ID,
            manifest_sha256=MANIFEST,
            uid=uid,
            window=self.window,
            base_digest=self.base_digest,
            sample_digest="5" * 64,
            nbytes=len(frame),
            sha256=hashlib.sha256(frame).hexdigest(),
        )

    def publish(self, bucket: Bucket) -> int:
        """Publishes all peers; bytes of one object."""
        for seed, uid in enumerate(self.uids):
            frame = self.frame(uid, seed=seed)
            told = self.statement(uid, frame)
            deadline = CLOCK.now() + 60
            publish(bucket, self.prefix(uid), frame, told, secret(uid), keep=9, deadline=deadline)
        return len(frame)


def secret(uid: str) -> SecretKey:
    return SecretKey(hashlib.sha256(uid.encode()).digest())


def payload(elements: int, *, seed: int) -> bytes:
    """One tile again and again."""
    drawn = np.random.default_rng(seed).standard_normal(FULL_TILE_ELEMENTS, np.float32)
    tile = TopK().encode(torch.from_numpy(drawn * np.float32(1e-3)), noise=None, first_group=0)
    data, nbytes = tile.numpy().tobytes(), TopK().encoded_bytes(elements)
    return (data * (nbytes // len(data) + 1))[:nbytes]


def access(endpoint: str) -> S3Access:
    """The S3 server that the tests start, at `endpoint` or through a proxy there."""
    return S3Access(
        access_key_id=servers.ACCESS_KEY_ID,
        secret_access_key=servers.SECRET_ACCESS_KEY,
        endpoint=endpoint,
    )
