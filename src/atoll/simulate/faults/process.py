"""A worker's process: the island's own conversation, driven by events, over a network that fails.

Trains nothing: its displacement is the stand-in's. All that it says, keeps and makes of an answer
is the island's code; what is here carries that out, and adds what a broken island would send.
"""

import hashlib
import random
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

from atoll.coordinator import handlers
from atoll.coordinator.accept.admission import UploadRequest
from atoll.coordinator.accept.uploads import UploadStream
from atoll.coordinator.handlers import Arrival
from atoll.coordinator.service import Coordinator
from atoll.errors import AtollError, FrameError, StaleGeneration
from atoll.island.conversation import hand_in
from atoll.island.conversation import session as sessions
from atoll.island.conversation.beside import Beside
from atoll.island.conversation.intents import (
    Attend,
    Evaluate,
    Foresee,
    Lead,
    Partial,
    Pause,
    Persist,
    Send,
    Steps,
    Train,
    Trained,
    Upload,
)
from atoll.island.conversation.rounds import Rounds
from atoll.island.conversation.session import Session
from atoll.island.link.base import Download
from atoll.island.state.continuity import Continuity
from atoll.island.state.store import IslandIdentity
from atoll.island.state.weights import IslandWeights
from atoll.island.telemetry import Samples
from atoll.layout import Span
from atoll.ledger.records import ContributionRecord
from atoll.protocol.exchange import Ask, Waiting
from atoll.protocol.messages import (
    Assignment,
    AssignmentRequest,
    EvaluationReport,
    HeartbeatRequest,
    Identity,
    InfoRequest,
    LeaveRequest,
    RegisterRequest,
    Telemetry,
)
from atoll.simulate.faults import standin
from atoll.simulate.faults.calls import Call
from atoll.simulate.faults.disk import Disk
from atoll.simulate.faults.invariants.islands import IslandCheck, ThreadCheck, Work
from atoll.simulate.faults.loop import EventLoop, LoopClock
from atoll.simulate.faults.reference import Reference
from atoll.simulate.faults.scenario import BLOCK
from atoll.simulate.faults.standin import Frame, Inner
from atoll.wire.header import FrameHeader

CHUNK_BYTES = 900
_STEPS = 1  # of a simulated round: what it moves, it moves at once
WAIT_SECONDS = 0.7  # how long a question waits for something to tell
_KINDS: dict[type[Ask[Any]], str] = {
    InfoRequest: "info",
    RegisterRequest: "register",
    HeartbeatRequest: "heartbeat",
    AssignmentRequest: "assignment",
    EvaluationReport: "evaluation",
    LeaveRequest: "leave",
}

Events = Generator[Call | float, Any, Any]


class _Weights(IslandWeights):
    """An island's weights, whose bits may flip as they arrive."""

    on_adopted: Callable[[], None] = staticmethod(lambda: None)

    def adopt(self, version: int, digest: str, span: Span) -> None:
        super().adopt(version, digest, span)
        self.on_adopted()


class Process:
    """One life of a worker. `main` and `pulse` are its two threads."""

    def __init__(
        self,
        worker_id: str,
        disk: Disk,
        *,
        number: int,
        seed: int,
        step_seconds: float,
        loop: EventLoop,
        reference: Reference,
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
        self.on_attend: Callable[[Any], None] = lambda _: None
        self.flips = 0.0  # how often its weights go bad as they arrive
        self.repeats = 0.0  # how often it sends an old frame once more
        self._seed = seed
        self._clock = LoopClock(loop, started=0.0, wall_offset=0.0)
        self._check = IslandCheck(self.name, disk.memory, reference)
        self._inner = Inner()
        self._model = standin.module()
        self._rounds: Rounds | None = None  # once it has registered
        self._beside: Beside | None = None
        self._attends = 0  # the incarnation whose presence stream is open
        self._given: Assignment | None = None  # what it trained last
        self._sent: list[Frame] = []

    def hurry(self) -> None:
        """It is slow no more."""
        self.slowness = 1.0

    def corrupt(self) -> None:
        """Its memory flips a bit: what it holds has another digest now."""
        if self._rounds is not None and self._rounds.weights.digest is not None:
            self._rounds.weights.digest = f"{self.rng.getrandbits(256):064x}"

    def _flip(self) -> None:
        if self.rng.random() < self.flips:
            self.corrupt()

    # The two threads

    def main(self) -> Events:
        """The island's life, as `island.run` has it."""
        try:
            yield from self._drive(self._live(), ThreadCheck(self.name, trains=True))
        except AtollError as error:
            self._check.ended(error)
            raise

    def _live(self) -> Steps[None]:
        info = yield from sessions.look(self.rng)
        session = Session(IslandIdentity(self.worker_id, self.disk.key), info, self.rng)
        adopted = session.adopted
        weights = _Weights(
            self._model, standin.LAYOUT, strategy=adopted.asked, download=adopted.download
        )
        weights.on_adopted = self._flip
        elements = standin.LAYOUT.size
        continuity = Continuity(self.disk.store, info, worker_id=self.worker_id, elements=elements)
        continuity.start(self._inner.as_optimizer())
        self._beside = Beside(session, Telemetry, Samples(self._clock))
        yield from session.register(
            layout_digest=standin.LAYOUT.digest, data_identity=adopted.manifest.data.identity
        )
        self._rounds = Rounds(session, weights, continuity)
        yield from self._rounds.take_part()

    def pulse(self) -> Events:
        """Presence and heartbeats; what they meet, the training thread meets too and acts on."""
        check = ThreadCheck(self.name, trains=False)
        while True:
            yield 2.0 * self.rng.uniform(0.9, 1.1)
            if self._beside is None or self._rounds is None:
                continue
            try:
                yield from self._drive(self._beside.beat(), check)
                if self._attends != self._rounds.session.standing.incarnation:
                    yield from self._drive(self._beside.attend(), check)
            except AtollError:
                continue

    def aside(self) -> Call | None:
        """What it may just as well be saying now; nobody waits for the answer."""
        if self._rounds is None or self._beside is None or not self._rounds.session.is_registered:
            return None
        intent = next(self.rng.choice((self._rounds.ask, self._beside.beat))())
        assert isinstance(intent, Send)
        return self._message(intent.message)

    # Carrying out what the conversation asks for

    def _drive(self, steps: Steps[Any], check: ThreadCheck) -> Events:
        answer, error = None, None
        while True:
            try:
                intent = steps.send(answer) if error is None else steps.throw(error)
            except StopIteration as done:
                return done.value
            answer = error = None
            try:
                answer = yield from self._do(intent, check)
            except AtollError as exc:
                error = exc

    def _do(self, intent: object, check: ThreadCheck) -> Events:
        match intent:
            case Send(message):
                return (yield from self._send(message, check))
            case Upload():
                return (yield from self._hand_in(intent, check))
            case Download():
                return (yield from self._checked(self._download(intent), intent, check))
            case Attend():
                return (yield from self._checked(self._attend(intent), intent, check))
            case Pause(seconds):
                yield seconds
            case Persist(work):
                work()
                return lambda: None
            case Lead(make):
                return (yield from self._drive(make(), check))
            case Train(given):
                return (yield from self._train(given))
            case Evaluate(task):
                tokens = (task.stop - task.start) * BLOCK
                return Partial(float(tokens), tokens)
            case Foresee():
                return None
            case _:
                raise AssertionError(f"nobody does {intent}")

    def _checked(self, events: Events, said: Any, check: ThreadCheck) -> Events:
        """What `said`, which is being sent, comes to; `check` is told of both."""
        identity: Identity | None = getattr(said, "identity", None)
        check.says(said, identity)
        try:
            return (yield from events)
        except AtollError as error:
            check.told(error, identity)
            raise

    def _call(self, kind: str, work: Callable[[Coordinator], Any], **more: Any) -> Call:
        return Call(kind, work, self.name, self.worker_id, **more)

    def _message(self, message: Ask[Any]) -> Call:
        facts: dict[str, Any] = {}
        if isinstance(message, RegisterRequest):
            facts = {"key_sha256": hashlib.sha256(message.island_key.encode()).hexdigest()}
        if isinstance(message, AssignmentRequest):
            facts = {"digest": message.digest}
        return self._call(
            _KINDS[type(message)],
            lambda c: handlers.answer(c, message, Arrival()),
            identity=getattr(message, "identity", None),
            facts=facts,
        )

    def _send(self, message: Ask[Any], check: ThreadCheck) -> Events:
        if isinstance(message, AssignmentRequest):
            self._check.asks()

        def sent() -> Events:
            return (yield self._message(message))

        reply = yield from self._checked(sent(), message, check)
        if isinstance(message, Waiting) and not message.is_answered(reply):
            yield WAIT_SECONDS
        return reply

    def _attend(self, intent: Attend) -> Events:
        identity = intent.identity
        opened = yield self._call(
            "attend", lambda c: c.attend(identity, close=lambda: None), identity=identity
        )
        stream, life = opened
        self._attends = identity.incarnation
        self.on_attend((life, stream))
        return stream

    def _download(self, intent: Download) -> Events:
        identity = intent.identity

        def work(coordinator: Coordinator) -> tuple[str, bytes]:
            spooled = coordinator.download(
                identity, round_number=intent.round_number, have_digest=intent.have_digest
            )
            coordinator.sent(identity, spooled.nbytes)
            return spooled.tag, spooled.read(0, spooled.nbytes)

        tag, data = yield self._call("download", work, identity=identity)
        intent.progress.opened(tag, 0)
        intent.sink(data)
        intent.progress.offset = len(data)
        self._check.fetched(data)

    # Rounds

    def _train(self, given: Assignment) -> Events:
        assert self._rounds is not None
        self._check.trains(self._inner.rounds)
        yield self.step_seconds * self.slowness * self.rng.uniform(0.5, 1.5)
        self._given = given
        if self.rng.random() < self.rogue:
            yield from self._misbehave(given)
        delta = standin.values(f"{self._seed}/{self.name}/{given.round}/{given.ranges}", scale=0.01)
        standin.move(self._model, delta)
        self._check.trained(Work(given, delta))
        for number in self._rounds.session.adopted.asked.due(given.round or 0, _STEPS):
            yield from self._drive(self._rounds.merge(number), ThreadCheck(self.name, trains=True))
        self._inner.rounds += 1
        return _trained(given)

    def _hand_in(self, intent: Upload, check: ThreadCheck) -> Events:
        """The island's contribution; what came of it is its own matter."""
        assert self._rounds is not None
        frame = Frame(intent.frame.read(0, intent.frame.nbytes), intent.frame.sha256)
        self._check.sends(frame, self._rounds.session.adopted.manifest)
        try:
            yield from self._checked(
                self._upload(intent.identity, frame, intent.before_commit), intent, check
            )
        except AtollError as error:
            self._check.refused(error)
            raise
        self._sent.append(frame)
        if self.rng.random() < self.repeats:
            yield from self._add(self.rng.choice(self._sent))
        if self._given is not None and self.rng.random() < self.rogue:
            yield from self._misbehave(self._given)
        self._check.received()
        return "receipt"

    def _upload(
        self, identity: Identity, frame: Frame, before_commit: Callable[[], None]
    ) -> Events:
        request = UploadRequest(identity, frame.preamble, frame.sha256, len(frame.data))
        about: dict[str, Any] = {"identity": identity, "frame": frame}
        offset = yield self._call("offset", lambda c: c.upload_offset(request), **about)
        at = replace(request, offset=0 if offset == len(frame.data) else offset)
        try:
            yield from self._stream(at, frame, before_commit)
        except FrameError:
            if not at.offset:
                raise
            yield from self._stream(request, frame, before_commit)  # as a link does

    def _stream(self, at: UploadRequest, frame: Frame, before_commit: Callable[[], None]) -> Events:
        about: dict[str, Any] = {"identity": at.identity, "frame": frame}
        opened, of = yield self._call("begin", lambda c: c.begin_upload(at), **about)
        if isinstance(opened, ContributionRecord):
            return
        for start in range(at.offset, len(frame.data), CHUNK_BYTES):
            chunk = frame.data[start : start + CHUNK_BYTES]
            yield self._call("write", _writing(opened, chunk), life=of, identity=at.identity)
        before_commit()
        yield self._call("commit", lambda c: c.commit_upload(opened), life=of, **about)

    # What a broken island sends

    def _misbehave(self, given: Assignment) -> Events:
        """Sends a frame that must be refused: a bug of an island must not harm the run."""
        assert self._rounds is not None
        session = self._rounds.session
        assert given.round is not None
        header = hand_in.header_of(
            session, self._rounds.weights, given, _trained(given), began=given.round
        )
        wrong = self.rng.choice(_wrong(header))
        label = f"{self._seed}/{self.name}/{header.round}/rogue"
        yield from self._add(standin.contribution(wrong, session.adopted.manifest, label))

    def _add(self, frame: Frame) -> Events:
        """Sends what nobody asked for; nothing may come of it."""
        assert self._rounds is not None
        standing = self._rounds.session.standing
        for _ in range(2):
            try:
                yield from self._upload(standing.identity(), frame, lambda: None)
            except StaleGeneration as stale:
                standing.told(stale.present)
                continue
            except AtollError:
                pass
            return


def _trained(given: Assignment) -> Trained:
    rows = sum(map(len, given.ranges))
    return Trained(float(rows * BLOCK), rows * BLOCK, rows)


def _wrong(header: FrameHeader) -> tuple[FrameHeader, ...]:
    moved = tuple(replace(span, start=span.start + 1, stop=span.stop + 1) for span in header.ranges)
    return (
        replace(header, base_digest="0" * 64),
        replace(header, round=header.round + 1),
        replace(header, round=max(1, header.round - 1)),
        replace(header, weight=header.weight + 1),
        replace(header, ranges=moved),
        header,  # other bytes for the same key
    )


def _writing(stream: UploadStream, chunk: bytes) -> Callable[[Coordinator], None]:
    return lambda coordinator: coordinator.write_upload(stream, chunk)
