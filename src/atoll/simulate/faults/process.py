"""A worker's process: the island's side of the protocol as a generator of messages and pauses.

Trains nothing: its displacement is the stand-in's. Its weights are the island's own code, and what
it keeps on disk is what an island keeps: its key, and the frame whose receipt is not here yet.
"""

import hashlib
import random
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from atoll.codecs import registry as codecs
from atoll.coordinator.accept.admission import UploadRequest
from atoll.coordinator.accept.uploads import UploadStream
from atoll.coordinator.service import Coordinator
from atoll.errors import (
    AtollError,
    Conflict,
    ContributionError,
    FrameError,
    LeaseLost,
    ManifestMismatch,
    StaleContribution,
    StaleGeneration,
    UnknownWorker,
    WrongRound,
)
from atoll.island.state.weights import IslandWeights
from atoll.ledger.records import ContributionRecord
from atoll.protocol.messages import (
    Assignment,
    AssignmentRequest,
    HeartbeatRequest,
    Identity,
    Info,
    RegisterRequest,
)
from atoll.rows import RowRange
from atoll.simulate.faults import standin
from atoll.simulate.faults.calls import Call
from atoll.simulate.faults.scenario import BLOCK
from atoll.simulate.faults.standin import Frame
from atoll.wire.header import FrameHeader

CHUNK_BYTES = 900
WAIT_SECONDS = 0.7
TRIES = 50
_ROUND_IS_OVER = (StaleContribution, Conflict, LeaseLost, WrongRound, ContributionError)

Steps = Generator[Call | float, Any, Any]


@dataclass
class Disk:
    """What of a worker survives its death."""

    key: str
    pending: Frame | None = None


class Process:
    """One life of a worker. `main` and `pulse` are its two threads."""

    def __init__(
        self, worker_id: str, disk: Disk, *, number: int, seed: int, step_seconds: float
    ) -> None:
        self.worker_id = worker_id
        self.disk = disk
        self.name = f"{worker_id}#{number}"
        self.rng = random.Random(f"process {seed} {number}")
        self.step_seconds = step_seconds
        self.slowness = 1.0
        self.is_alive = True
        self.stopped_until = 0.0
        self.jump = 1.0  # its clock jumps: the next pause takes so many times as long
        self.rogue = 0.0  # how often it also sends what must be refused
        self.info: Info | None = None
        self.incarnation = 0
        self.generation = 0
        self.on_attend: Callable[[Any], None] = lambda _: None
        self.weights = IslandWeights(
            standin.module(), standin.LAYOUT, download=codecs.DEFAULT.build()
        )
        self.flips = 0.0  # how often its weights go bad as they arrive
        self.repeats = 0.0  # how often it sends an old frame once more
        self._seed = seed
        self._joining = False
        self._attends = False
        self._sent: list[Frame] = []

    def hurry(self) -> None:
        """It is slow no more."""
        self.slowness = 1.0

    # Messages

    def _identity(self) -> Identity:
        assert self.info is not None
        return Identity(
            run_id=standin.RUN_ID,
            manifest_sha256=self.info.manifest_sha256,
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            island_key=self.disk.key,
            generation=self.generation,
        )

    def _call(self, kind: str, work: Callable[[Coordinator], Any], **more: Any) -> Call:
        return Call(kind, work, self.name, self.worker_id, **more)

    def _until_done(self, make: Callable[[], Steps]) -> Steps:
        """Repeats what an island repeats; errors that are final pass through."""
        pause = 0.1
        for _ in range(TRIES):
            try:
                return (yield from make())
            except StaleGeneration as stale:
                self.generation = stale.present
            except UnknownWorker:
                yield from self._register()
            except ManifestMismatch:
                yield from self._look()
            except AtollError as error:
                # A frame error: another stream of this upload took over, or it ended halfway.
                if not (error.retry or type(error) is FrameError):
                    raise
                yield pause * (0.5 + self.rng.random() / 2)
                pause = min(3.0, pause * 2)
        raise ManifestMismatch(f"{TRIES} tries in a row came to nothing")

    def _look(self) -> Steps:
        self.info = yield self._call("info", lambda c: c.info())
        assert self.info is not None
        self.weights.download = self.info.download.build()

    def _register(self) -> Steps:
        """One at a time: the other thread's registration counts for both."""
        if self._joining:
            yield 0.2
            return
        self._joining = True
        try:
            yield from self._register_now()
        finally:
            self._joining = False

    def _register_now(self) -> Steps:
        assert self.info is not None
        request = RegisterRequest(
            run_id=standin.RUN_ID,
            manifest_sha256=self.info.manifest_sha256,
            worker_id=self.worker_id,
            island_key=self.disk.key,
            layout_digest=standin.LAYOUT.digest,
            data_identity=self.info.manifest().data.identity,
        )
        reply = yield self._call(
            "register",
            lambda c: c.register(request),
            facts={"key_sha256": hashlib.sha256(self.disk.key.encode()).hexdigest()},
        )
        self.incarnation, self.generation = reply.incarnation, reply.generation
        self._attends = False

    def aside(self) -> Call | None:
        """What it may just as well be saying now; nobody waits for the answer."""
        if self.incarnation == 0:
            return None
        call = next(self.rng.choice((self._ask, self._beat))())
        assert isinstance(call, Call)
        return call

    # The two threads

    def pulse(self) -> Steps:
        """Presence, heartbeats, and a new registration where a refusal asks for one."""
        while True:
            yield 2.0 * self.rng.uniform(0.9, 1.1)
            if self.incarnation == 0:
                continue
            try:
                yield from self._adopting(self._beat)
                if not self._attends:
                    yield from self._adopting(self._attend)
            except UnknownWorker:
                yield from self._come_back()
            except AtollError:
                continue  # the training thread meets it and acts

    def _come_back(self) -> Steps:
        try:
            yield from self._register()
        except AtollError:
            return  # tried again with the next beat

    def _adopting(self, make: Callable[[], Steps]) -> Steps:
        """Repeats a message at once in the generation that its refusal names."""
        for _ in range(TRIES):
            try:
                return (yield from make())
            except StaleGeneration as stale:
                self.generation = stale.present

    def _beat(self) -> Steps:
        identity = self._identity()
        request = HeartbeatRequest(identity=identity)
        reply = yield self._call("heartbeat", lambda c: c.heartbeat(request), identity=identity)
        self.generation = reply.generation

    def _attend(self) -> Steps:
        identity = self._identity()
        stream, life = yield self._call(
            "attend", lambda c: c.attend(identity, close=lambda: None), identity=identity
        )
        self._attends = True
        self.on_attend((life, stream))

    def main(self) -> Steps:
        """Registers, takes up what an earlier life left, and trains round after round."""
        yield from self._until_done(self._look)
        yield from self._until_done(self._register)
        if self.disk.pending is not None:
            yield from self._hand_in(self.disk.pending)
        while True:
            given: Assignment = yield from self._until_done(self._ask)
            self.generation = given.generation
            if given.action == "stop":
                yield from self._leave()
                return
            if given.action == "fetch":
                yield from self._until_done(self._fetch)
            elif given.action == "train":
                yield from self._train(given)
            else:
                yield WAIT_SECONDS

    def _leave(self) -> Steps:
        identity, self.incarnation = self._identity(), 0
        yield self._call("leave", lambda c: c.deregister(identity), identity=identity)

    def _ask(self) -> Steps:
        identity = self._identity()
        request = AssignmentRequest(
            identity=identity, version=self.weights.version, digest=self.weights.digest
        )
        return (
            yield self._call(
                "assignment",
                lambda c: c.assignment(request),
                identity=identity,
                facts={"digest": self.weights.digest},
            )
        )

    def _fetch(self) -> Steps:
        identity = self._identity()
        have = self.weights.digest or ""

        def work(coordinator: Coordinator) -> bytes:
            spooled = coordinator.download(identity, have_digest=have)
            coordinator.sent(identity, spooled.nbytes)
            return spooled.read(0, spooled.nbytes)

        data = yield self._call("download", work, identity=identity)
        receiver = self.weights.receive(run_id=standin.RUN_ID)
        try:
            receiver.feed(data)
            receiver.finish()
        except FrameError:
            self.weights.forget()
        if self.weights.digest is not None and self.rng.random() < self.flips:
            self.corrupt()

    def corrupt(self) -> None:
        """Its memory flips a bit: what it holds has another digest now."""
        if self.weights.digest is not None:
            self.weights.digest = f"{self.rng.getrandbits(256):064x}"

    def _train(self, given: Assignment) -> Steps:
        yield self.step_seconds * self.slowness * self.rng.uniform(0.5, 1.5)
        if given.manifest_sha256 != (self.info and self.info.manifest_sha256):
            yield from self._until_done(self._look)
            if given.manifest_sha256 != (self.info and self.info.manifest_sha256):
                return
        self.disk.pending = self._frame(self._header(given))
        if self.rng.random() < self.rogue:
            yield from self._misbehave(given)
        yield from self._hand_in(self.disk.pending)
        if self.rng.random() < self.rogue:
            yield from self._misbehave(given)

    def _header(self, given: Assignment) -> FrameHeader:
        assert self.info is not None and given.round is not None
        rows = sum(map(len, given.ranges))
        tokens = rows * BLOCK
        return FrameHeader.of(
            standin.LAYOUT,
            self.info.upload.build(),
            kind="contribution",
            run_id=standin.RUN_ID,
            manifest_sha256=self.info.manifest_sha256,
            round=given.round,
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            base_digest=given.digest,
            weight=1 if self.info.weighting == "equal" else tokens,
            rows=rows,
            tokens=tokens,
            loss_sum=float(tokens),
            ranges=given.ranges,
        )

    def _frame(self, header: FrameHeader, *, label: str = "") -> Frame:
        assert self.info is not None
        spans = tuple((span.start, span.stop) for span in header.ranges)
        made = f"{self._seed}/{self.name}/{header.round}/{spans}/{label}"
        return Frame(header, self.info.manifest(), made)

    # Uploads

    def _hand_in(self, frame: Frame) -> Steps:
        """Sends a contribution until there is a receipt or a refusal; either ends its round."""
        with suppress(*_ROUND_IS_OVER):
            yield from self._until_done(lambda: self._upload(frame))
        self.disk.pending = None
        self._sent.append(frame)
        if self.rng.random() < self.repeats:
            yield from self._repeat(self.rng.choice(self._sent))

    def _repeat(self, frame: Frame) -> Steps:
        """Sends once more what it sent in this round or long ago; nothing may come of it."""
        try:
            yield from self._upload(frame)
        except AtollError:
            return

    def _upload(self, frame: Frame) -> Steps:
        identity = self._identity()
        request = UploadRequest(identity, frame.preamble, frame.sha256, len(frame.data))
        about: dict[str, Any] = {"identity": identity, "frame": frame}
        offset = yield self._call("offset", lambda c: c.upload_offset(request), **about)
        at = replace(request, offset=0 if offset == len(frame.data) else offset)
        opened, of = yield self._call("begin", lambda c: c.begin_upload(at), **about)
        if isinstance(opened, ContributionRecord):
            return
        for start in range(at.offset, len(frame.data), CHUNK_BYTES):
            chunk = frame.data[start : start + CHUNK_BYTES]
            yield self._call("write", _writing(opened, chunk), life=of, identity=identity)
        yield self._call("commit", lambda c: c.commit_upload(opened), life=of, **about)

    def _misbehave(self, given: Assignment) -> Steps:
        """Sends a frame that must be refused: a bug of an island must not harm the run."""
        header = self._header(given)
        wrong = self.rng.choice(
            (
                replace(header, base_digest="0" * 64),
                replace(header, round=header.round + 1),
                replace(header, round=max(1, header.round - 1)),
                replace(header, weight=header.weight + 1),
                replace(header, ranges=tuple(_moved(span) for span in header.ranges)),
                header,  # other bytes for the same key
            )
        )
        try:
            yield from self._adopting(lambda: self._upload(self._frame(wrong, label="rogue")))
        except AtollError:
            return


def _moved(span: RowRange) -> RowRange:
    return replace(span, start=span.start + 1, stop=span.stop + 1)


def _writing(stream: UploadStream, chunk: bytes) -> Callable[[Coordinator], None]:
    return lambda coordinator: coordinator.write_upload(stream, chunk)
