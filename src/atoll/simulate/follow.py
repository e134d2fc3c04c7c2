"""A run trained once more as its ledger says: who trained which rows from which version, in turn.

Real islands train again, in fibers; what each is given next comes from the records in place of a
coordinator. The contributions that they make are folded round by round, as the records say; those
that publish do so into buckets of their own, in memory, and gather from these. Where
the bits depend on nothing that is not recorded, the weights are the run's: replay proves the fold,
this proves the training too. An island that lost its state directory began anew, which no ledger
tells: such a run cannot be followed.
"""

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from atoll import torch_threads
from atoll.blobs.base import Blobs
from atoll.blobs.directory import DirectoryBlobs
from atoll.errors import AtollError, WrongRound
from atoll.gather.publish import frame_key
from atoll.island import trainer
from atoll.island.link.base import Attendance, Download, FrameSource, Work
from atoll.island.run import Run
from atoll.island.state.store import IslandIdentity, IslandStore
from atoll.layout import Layout
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import ContributionRecord, LeaseState, RoundState
from atoll.protocol.exchange import Ask
from atoll.protocol.gather import (
    AnnounceReply,
    AnnounceRequest,
    GatheredPeer,
    WindowReply,
    WindowRequest,
    prefix_of,
)
from atoll.protocol.manifest import Manifest
from atoll.protocol.messages import (
    Assignment,
    AssignmentRequest,
    Done,
    Identity,
    Info,
    InfoRequest,
    Publisher,
    RegisterReply,
    RegisterRequest,
)
from atoll.simulate import buckets
from atoll.simulate.fibers import Scheduler
from atoll.traffic import Traffic
from atoll.versions import recorded, weights
from atoll.versions.manifests import Manifests
from atoll.versions.replay import Replay

CHUNK_BYTES = 1 << 20
POLL_SECONDS = 1.0  # virtual: how often an island looks whether its version is there
LIMIT_SECONDS = 1e7

Key = tuple[int, str]  # of a contribution: the round it was made for, and its worker


@dataclass(frozen=True)
class Followed:
    """What training a run once more came to."""

    rounds: int
    contributions: int
    digest: str
    recorded_digest: str

    @property
    def agrees(self) -> bool:
        """Whether the weights are the run's, bit for bit."""
        return self.digest == self.recorded_digest


def follow(ledger: Ledger, blobs: Blobs, home: Path, *, location: str | None = None) -> Followed:
    """Trains every published round of the run again; keeps what it makes in `home`, an empty one.

    Of `blobs` only the initial weights are read.
    """
    with torch_threads.kept(), closing(DirectoryBlobs(home / "blobs")) as made:
        script = _Script(ledger, blobs, made)
        torch_threads.use(script.manifests.first.manifest.inner.threads)
        return _trained(script, home, location)


def _trained(script: "_Script", home: Path, location: str | None) -> Followed:
    scheduler = script.scheduler
    folding = scheduler.spawn("fold", script.fold)
    workers = sorted({worker_id for _, worker_id in script.wanted})
    fibers = [
        scheduler.spawn(worker_id, partial(_island, script, worker_id, home, location))
        for worker_id in workers
    ]
    scheduler.run_until(
        lambda: folding.done and all(fiber.done for fiber in fibers), limit_seconds=LIMIT_SECONDS
    )
    return script.result()


def _island(script: "_Script", worker_id: str, home: Path, location: str | None) -> None:
    identity = IslandIdentity(worker_id, random.Random(f"follow {worker_id}").randbytes(32).hex())
    with closing(IslandStore(home / worker_id)) as store:
        link, jitter = _Link(script, worker_id), random.Random(worker_id)
        scheduler = script.scheduler
        made = buckets.of_island(
            script.buckets, worker_id, store.directory / "gather", scheduler, link.traffic
        )
        run = Run(
            *(link, store, scheduler),
            identity=identity,
            jitter=jitter,
            spawn=lambda part, work: scheduler.spawn(f"{worker_id} {part}", work),
            buckets=made,
        )
        trainer.train(run, location=location)


class _Script:
    """What the records say, and how far it was trained again. For one scheduler's fibers."""

    def __init__(self, ledger: Ledger, blobs: Blobs, made: Blobs) -> None:
        self.scheduler = Scheduler()
        self.blobs = made
        self.manifests = Manifests.of(ledger)
        self.layout: Layout = recorded.layout_of(self.manifests.first.manifest)
        with ledger.reading() as t:
            run, rounds = t.run.get(), t.rounds.all()
            assert run is not None, "a ledger without a run has nothing to follow"
            self.run_id = run.run_id
            self.rounds = {r.round: r for r in rounds}
            self.published = [r for r in rounds if r.state is RoundState.PUBLISHED]
            folded = [t.contributions.of_round(r.round) for r in self.published]
            self.folded: Sequence[Sequence[ContributionRecord]] = folded
            self.wanted = {(c.round, c.worker_id) for round_ in folded for c in round_}
            leases = [x for r in rounds for x in t.leases.of_round(r.round)]
        self.leases = [x for x in leases if x.state is LeaseState.DONE]
        replay = partial(Replay, ledger, manifests=self.manifests, layout=self.layout)
        self._replay: Replay = replay(blobs=made)
        self._version = replay(blobs=blobs).restore(None)
        self._initial = self._version.digests.master.root
        self.made: dict[Key, str] = {}  # blobs of what was trained again
        self.offered: dict[int, tuple[str, str]] = {}  # by version: a blob of it whole, its digest
        self.buckets = buckets.made_for(self.manifests.first.manifest.gather, self.scheduler)
        self.publishers: dict[str, Publisher] = {}  # by worker, where islands publish
        self._windows: dict[int, WindowReply] = {}  # by round: what was folded again
        self._offer()

    def fold(self) -> None:
        """Computes round after round, each when its contributions are there."""
        for record, contributions in zip(self.published, self.folded, strict=True):
            keys = [(c.round, c.worker_id) for c in contributions]
            while not all(key in self.made for key in keys):
                self.scheduler.sleep(POLL_SECONDS)
            again = [
                replace(c, sha256=self.made[key])
                for c, key in zip(contributions, keys, strict=True)
            ]
            base = self._version.digests.published.root
            found = self._replay.apply(self._version, record.round, again)
            self._replay.moved(self._version, record.round, len(again), found.digests)
            if self.buckets:
                self._tell(record.round, again, base)
            self._offer()

    def _tell(self, number: int, folded: Sequence[ContributionRecord], base: str) -> None:
        """Keeps what islands gather a version by."""
        peers = []
        for one in folded:
            where = self.publishers[one.worker_id]
            with self.blobs.open(one.sha256) as reader:
                nbytes = reader.nbytes
            peers.append(
                GatheredPeer(
                    worker_id=one.worker_id,
                    key=where.key,
                    bucket=where.bucket,
                    sha256=one.sha256,
                    nbytes=nbytes,
                    weight=one.weight,
                )
            )
        self._windows[number] = WindowReply(
            round=number,
            base_digest=base,
            result_digest=self._version.digests.published.root,
            peers=tuple(peers),
        )

    def window(self, number: int) -> WindowReply:
        """What a round folded, as the coordinator tells it."""
        if number not in self._windows:
            raise WrongRound(f"round {number} is not folded again yet; ask for an earlier one")
        return self._windows[number]

    def _offer(self) -> None:
        """Stores the published weights, if somebody trains from them."""
        number, published = self._version.number, self._version.digests.published.root
        if any(made_for - 1 == number for made_for, _ in self.wanted):
            header = weights.weights_header(
                self.layout,
                run_id=self.run_id,
                manifest_sha256=self.manifests.of_round(number).sha256,
                version=number,
                digest=published,
            )
            flat = self._version.state.published
            sha256 = weights.store(self.blobs, header, flat, layout=self.layout)
            self.offered[number] = sha256, published

    def next_of(self, worker_id: str) -> int | None:
        """The round that the worker makes its next contribution for."""
        left = self.wanted - self.made.keys()
        return min((made_for for made_for, worker in left if worker == worker_id), default=None)

    def assignment(self, worker_id: str, asked: AssignmentRequest) -> Assignment:
        """What the worker did next, as the records say; waits until its version is there."""
        made_for = self.next_of(worker_id)
        if made_for is None:
            version, digest = asked.version or 0, asked.digest or self._initial
            return Assignment(action="stop", version=version, digest=digest)
        while made_for - 1 not in self.offered:
            self.scheduler.sleep(POLL_SECONDS)
        base, digest = made_for - 1, self.offered[made_for - 1][1]
        if (asked.version, asked.digest) != (base, digest):
            return Assignment(action="fetch", version=base, digest=digest)
        record, settings = self.rounds[made_for], self.manifests.of_round(made_for)
        holding = {x.worker_id for x in self.leases if x.round == made_for}
        mine = [x for x in self.leases if (x.round, x.worker_id) == (made_for, worker_id)]
        return Assignment(
            action="train",
            version=base,
            digest=digest,
            round=made_for,
            manifest_sha256=settings.sha256,
            fragment=record.fragment,
            ranges=tuple(x.row_range for x in mine),
            global_tokens=record.tokens,
            num_planned=settings.round_strategy.abreast(len(holding)),
        )

    def info(self, asked: InfoRequest) -> Info:
        known = self.manifests
        found = known.first if asked.manifest is None else known.get(asked.manifest)
        fields: dict[str, Any] = {
            name: getattr(found.manifest, name) for name in Manifest.model_fields
        }
        fields |= {"run_id": self.run_id, "manifest_sha256": found.sha256}
        return Info(**fields, model_hash=self.layout.digest, version=0, transfer_port=0)

    def result(self) -> Followed:
        digest = self._version.digests.master.root
        said = self.published[-1].master_digest if self.published else self._initial
        return Followed(len(self.published), len(self.made), digest, said or "")


@dataclass(eq=False)
class _Link:
    """One island's link to the records."""

    script: _Script
    worker_id: str
    traffic: Traffic = field(default_factory=Traffic)

    def send(self, message: Ask[Any], *, alone: bool = False) -> Any:  # noqa: ARG002  # always
        match message:
            case InfoRequest():
                return self.script.info(message)
            case RegisterRequest():
                if message.publishes is not None:
                    self.script.publishers[self.worker_id] = message.publishes
                digest = self.script.manifests.first.manifest.model.initial_digest
                return RegisterReply(incarnation=1, generation=1, version=0, digest=digest)
            case AssignmentRequest():
                return self.script.assignment(self.worker_id, message)
            case WindowRequest():
                return self.script.window(message.round)
            case AnnounceRequest():
                self._take(message.nbytes, self._pulled(message.sha256))
                return AnnounceReply(receipt="followed")
        return Done()

    def attend(self, identity: Identity) -> Attendance:  # noqa: ARG002  # there is none
        raise AtollError("nobody attends while records are followed")

    def upload(
        self,
        identity: Identity,  # noqa: ARG002  # a link is one island's
        frame: FrameSource,
        *,
        before_commit: Work,
    ) -> str:
        offsets = range(0, frame.nbytes, CHUNK_BYTES)
        pieces = (frame.read(offset, CHUNK_BYTES) for offset in offsets)
        self._take(frame.nbytes, pieces, before_commit)
        return "followed"

    def _pulled(self, sha256: str) -> Iterator[memoryview]:
        """The frame that the island has published and announces."""
        bucket = self.script.buckets[self.script.publishers[self.worker_id].bucket]
        key = frame_key(prefix_of(self.script.run_id, self.worker_id), sha256)
        tag = bucket.look(key, deadline=math.inf)
        assert tag is not None, "what is announced was published before"
        return bucket.pieces(key, tag, 0, tag.nbytes, deadline=math.inf)

    def _take(
        self,
        nbytes: int,
        pieces: Iterable[bytes | memoryview],
        before_commit: Work = lambda: None,
    ) -> None:
        """Keeps what was trained again, for the fold."""
        writer = self.script.blobs.writer(expect_bytes=nbytes)
        for piece in pieces:
            writer.write(piece)
        before_commit()
        made_for = self.script.next_of(self.worker_id)
        assert made_for is not None, "only what the records name is trained"
        self.script.made[made_for, self.worker_id] = writer.commit().sha256

    def download(self, wanted: Download) -> None:
        made_for = self.script.next_of(self.worker_id)
        assert made_for is not None, "only what the records name is trained"
        sha256, _ = self.script.offered[made_for - 1]
        wanted.progress.opened(sha256, 0)
        with self.script.blobs.open(sha256) as reader:
            while wanted.progress.offset < reader.nbytes:
                left = reader.nbytes - wanted.progress.offset
                data = reader.read(wanted.progress.offset, min(left, CHUNK_BYTES))
                wanted.sink(data)
                wanted.progress.offset += len(data)

    def close(self) -> None:
        """Nothing is open."""
