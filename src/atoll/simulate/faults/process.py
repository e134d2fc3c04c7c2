"""A worker's process: the island's own conversation, driven by events, over a network that fails.

Trains nothing: its displacement is the stand-in's. All that it says, keeps and makes of an answer
is the island's code; what is here carries that out, and adds what a broken island would send.
"""

import random
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from atoll.coordinator import handlers
from atoll.coordinator.accept.admission import UploadRequest
from atoll.coordinator.handlers import Arrival
from atoll.coordinator.service import Coordinator
from atoll.errors import AtollError, FrameError, StaleGeneration
from atoll.gather import publish
from atoll.gather.keys import SecretKey
from atoll.island.conversation import hand_in, intents
from atoll.island.conversation import session as sessions
from atoll.island.conversation.beside import Beside
from atoll.island.conversation.intents import Steps, Trained
from atoll.island.conversation.rounds import Rounds
from atoll.island.conversation.session import Session
from atoll.island.gather import signing as signings
from atoll.island.gather.base import Collect, Publish
from atoll.island.gather.buckets import IslandBuckets
from atoll.island.gather.signing import Signing
from atoll.island.link.base import Download
from atoll.island.state.continuity import Continuity
from atoll.island.state.store import IslandIdentity
from atoll.island.state.weights import IslandWeights
from atoll.island.telemetry import Samples
from atoll.ledger.records import ContributionRecord
from atoll.protocol.exchange import Ask, Waiting
from atoll.protocol.gather import AnnounceRequest, prefix_of
from atoll.protocol.messages import Assignment, AssignmentRequest, Identity, Telemetry
from atoll.simulate.buckets import in_turn
from atoll.simulate.faults import standin
from atoll.simulate.faults.buckets import LeapingClock, Servers
from atoll.simulate.faults.calls import Call
from atoll.simulate.faults.disk import Disk
from atoll.simulate.faults.invariants.islands import IslandCheck, ThreadCheck
from atoll.simulate.faults.reference import Reference
from atoll.simulate.faults.scenario import BLOCK
from atoll.simulate.faults.standin import Frame, Inner
from atoll.simulate.faults.world import ProcessClock, World
from atoll.sums.digest import ParamsDigest
from atoll.traffic import Traffic
from atoll.wire.header import FrameHeader

CHUNK_BYTES = 900  # so small that the stand-in's frames have several, to be cut off between
WAIT_SECONDS = 0.7  # how long a question waits for something to tell

Events = Generator[Call | float | intents.Until, Any, Any]


class _Weights(IslandWeights):
    """An island's weights, whose bits may flip as they arrive; tells when it sets out anew."""

    on_arrived: Callable[[], None] = staticmethod(lambda: None)
    on_reset: Callable[[], None] = staticmethod(lambda: None)

    def reset(self) -> None:
        super().reset()
        self.on_reset()

    def arrived(self, header: FrameHeader, number: int, found: ParamsDigest) -> None:
        super().arrived(header, number, found)
        self.on_arrived()


@dataclass(eq=False)
class Process:
    """One life of a worker, with the threads that an island has: `threads`."""

    world: World
    worker_id: str
    number: int
    disk: Disk
    reference: Reference
    servers: Servers
    home: Path = Path()  # of what it fetches; a later life has another
    slowness: float = 1.0
    is_alive: bool = True
    stopped_until: float = 0.0
    jump: float = 1.0  # its clock jumps: the next pause takes so many times as long
    presence: tuple[Any, int] = (None, 0)  # its open stream, and the coordinator's life
    # Threads that wait for another one, with what they wait for
    waiting: list[tuple[Callable[[], object], Events]] = field(default_factory=list)
    _rounds: Rounds | None = None  # once it has registered
    _beside: Beside | None = None
    _attends: int = 0  # the incarnation whose presence stream is open
    _given: Assignment | None = None  # what it trained last
    _sent: list[Frame] = field(default_factory=list)
    _published: Frame | None = None  # what it announces

    def __post_init__(self) -> None:
        self.name = f"{self.worker_id}#{self.number}"
        self._seed = self.world.scenario.seed
        self._rng = random.Random(f"process {self._seed} {self.number}")
        self._check = IslandCheck(self.name, self.disk.memory, self.reference)
        self._inner = Inner()
        self._model = standin.module()
        self._started = threading.Condition()  # nobody is notified: one thread runs all of it

    def hurry(self) -> None:
        """It is slow no more."""
        self.slowness = 1.0

    @property
    def in_flight(self) -> int:
        """How many rounds it has handed in and not merged."""
        return self._check.in_flight

    def corrupt(self) -> None:
        """Its memory flips a bit: what it holds has another digest now."""
        if self._rounds is not None and self._rounds.weights.digest is not None:
            weights = self._rounds.weights
            weights.held = (weights.version, f"{self._rng.getrandbits(256):064x}")

    def _flip(self) -> None:
        if self._errs("corrupt weights", 0.15):
            self.corrupt()

    def _errs(self, kind: str, rate: float) -> bool:
        """Whether a fault of this kind comes now; draws, whether it can or not."""
        return self._rng.random() < rate and self.world.has(kind)

    # Its threads

    def threads(self) -> tuple[Events, ...]:
        """The training, what goes on beside it, and what travels."""
        return self.main(), self.pulse(), self._transfer("sending"), self._transfer("following")

    def _transfer(self, name: str) -> Events:
        yield intents.Until(lambda: self._rounds is not None, self._started)
        assert self._rounds is not None
        steps = getattr(self._rounds.transfers, name)()
        yield from self._drive(steps, ThreadCheck(trains=True))

    def main(self) -> Events:
        """The island's life, as `island.run` has it."""
        try:
            yield from self._drive(self._live(), ThreadCheck(trains=True))
        except AtollError as error:
            self._check.ended(error)
            raise

    def _live(self) -> Steps[None]:
        info = yield from sessions.look(self._rng)
        session = Session(IslandIdentity(self.worker_id, self.disk.key), info, self._rng)
        session.signing = self._signing
        adopted, layout = session.adopted, standin.LAYOUT
        weights = _Weights(self._model, layout, strategy=adopted.asked, download=adopted.download)
        weights.on_arrived, weights.on_reset = self._flip, self._check.sets_out
        continuity = Continuity(
            self.disk.store, info, worker_id=self.worker_id, elements=layout.size
        )
        continuity.start(self._inner.as_optimizer())
        self._beside = Beside(session, self._telemetry, Samples(ProcessClock(self.world)))
        yield from session.register(
            layout_digest=layout.digest, data_identity=adopted.manifest.data.identity
        )
        self._rounds = Rounds(session, weights, continuity)
        yield from self._rounds.take_part()

    def _telemetry(self) -> Telemetry:
        """Islands are of three kinds, and each may be slow for a time."""
        return Telemetry(tokens_per_second=(1 + self.number % 3) / self.slowness)

    def pulse(self) -> Events:
        """Presence and heartbeats; what they meet, the training thread meets too and acts on."""
        check = ThreadCheck(trains=False)
        while True:
            yield 2.0 * self._rng.uniform(0.9, 1.1)
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
        intent = next(self._rng.choice((self._rounds.ask, self._beside.beat))())
        assert isinstance(intent, intents.Send)
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

    def _do(self, intent: intents.Intent, check: ThreadCheck) -> Events:
        match intent:
            case intents.Pause(seconds):
                yield seconds
            case intents.Persist(work):
                work()
                self._saved()
                return lambda: None
            case intents.Lead(make):
                return (yield from self._drive(make(), check))
            case intents.Train(given):
                return (yield from self._train(given))
            case intents.Until():
                yield intent
            case intents.Evaluate(task):
                tokens = (task.stop - task.start) * BLOCK
                return intents.Partial(float(tokens), tokens)
            case intents.Foresee():
                return None
            case _:
                return (yield from self._say(intent, check))

    def _saved(self) -> None:
        """A contribution is on its disk: from now on it is sent, whatever happens."""
        assert self._rounds is not None
        store = self.disk.store
        newest = store.pending(store.rounds()[1][-1])
        self._check.makes(store.frame(newest), self._rounds.session.adopted.manifest)

    def _say(self, intent: intents.Said, check: ThreadCheck) -> Events:
        """What a thing that is said to the coordinator comes to; `check` is told of both."""
        said = intent.message if isinstance(intent, intents.Send) else intent
        identity = getattr(said, "identity", None)
        check.says(said, identity)
        try:
            match intent:
                case intents.Send(AnnounceRequest() as message):
                    return (yield from self._announce(message))
                case intents.Send(message):
                    return (yield from self._send(message))
                case Publish():
                    return (yield from self._publish(intent))
                case Collect():
                    return (yield from self._collect(intent))
                case intents.Upload():
                    return (yield from self._hand_in(intent))
                case Download():
                    return (yield from self._download(intent))
                case intents.Attend():
                    return (yield from self._attend(intent))
        except AtollError as error:
            check.told(error, identity)
            raise

    def _call(self, kind: str, work: Callable[[Coordinator], Any], **more: Any) -> Call:
        return Call(kind, work, self.name, self.worker_id, **more)

    def _message(self, message: Ask[Any]) -> Call:
        return self._call(
            type(message).__name__.removesuffix("Request").removesuffix("Report").lower(),
            lambda c: handlers.answer(c, message, Arrival()),
            identity=getattr(message, "identity", None),
            message=message,
        )

    def _send(self, message: Ask[Any]) -> Events:
        if isinstance(message, AssignmentRequest) and self._rounds is not None:
            self._check.asks(self._rounds.session.adopted.manifest)
        reply = yield self._message(message)
        if isinstance(message, Waiting) and not message.is_answered(reply):
            yield WAIT_SECONDS
        return reply

    def _attend(self, intent: intents.Attend) -> Events:
        identity = intent.identity
        self.presence = yield self._call(
            "attend", lambda c: c.attend(identity, close=lambda: None), identity=identity
        )
        self._attends = identity.incarnation
        return self.presence[0]

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
        """Moves the model once for each batch, and merges what is due, as `island.run` does."""
        assert self._rounds is not None and given.round is not None
        adopted = self._rounds.session.adopted
        self._check.trains(given, self._inner.rounds, adopted.manifest)
        self._given = given
        steps = -(-sum(map(len, given.ranges)) // adopted.manifest.inner.batch)
        pause = self.world.scenario.step_seconds * self.slowness / steps
        for step in range(1, steps + 1):
            yield pause * self._rng.uniform(0.5, 1.5)
            label = f"{self._seed}/{self.name}/{given.round}/{given.ranges}/{step}"
            delta = standin.values(label, scale=0.01)
            standin.move(self._model, delta)
            self._check.trained(delta, self._rounds.weights.local.clone())
            for number in adopted.asked.due(given.round, step):
                merged = yield from self._drive(
                    self._rounds.merge(number), ThreadCheck(trains=True)
                )
                if not merged:
                    return None
        yield from self._misbehave()
        self._inner.rounds += 1
        self._check.hands_over(given, self._rounds.weights.local.clone())
        if self.in_flight >= 2:
            self.world.note("met: two in flight", self.name)
        return _trained(given)

    def _hand_in(self, intent: intents.Upload) -> Events:
        """The island's contribution; what came of it is its own matter."""
        assert self._rounds is not None and isinstance(intent.frame, Frame)
        self._check.sends(intent.frame)
        try:
            yield from self._upload(intent)
        except AtollError as error:
            self._check.refused(error)
            raise
        yield from self._accepted(intent.frame)
        return "receipt"

    # Buckets

    @cached_property
    def _signing(self) -> Signing | None:
        names = self.servers.names
        if not names:
            return None
        key = SecretKey(self.disk.signing)
        return Signing(key, names[key.public.data[0] % len(names)])

    def _with_buckets(self, work: Callable[[IslandBuckets], None]) -> Events:
        """What `work` does with buckets; the time that it would take passes after it."""
        signing, clock = self._signing, LeapingClock(self.world)
        assert signing is not None, "a run with buckets"
        seen = self.servers.seen_by(clock)
        error = None
        try:
            work(IslandBuckets(seen, signing, self.home, clock, Traffic(), run=in_turn))
        except AtollError as exc:
            error = exc
        yield clock.leapt
        if error is not None:
            raise error

    def _publish(self, wanted: Publish) -> Events:
        assert isinstance(wanted.frame, Frame)
        self._published = wanted.frame
        yield from self._with_buckets(lambda buckets: buckets.publish(wanted))
        self.world.note("published", self.name)

    def _collect(self, wanted: Collect) -> Events:
        made = bytearray()

        def sink(piece: bytes | memoryview) -> None:
            wanted.sink(piece)
            made.extend(piece)

        yield from self._with_buckets(lambda buckets: buckets.collect(replace(wanted, sink=sink)))
        self._check.fetched(bytes(made))
        self.world.note("met: gathered", f"{self.name} {wanted.window.round}")

    def _announce(self, message: AnnounceRequest) -> Events:
        """The island's contribution, where it is pulled."""
        frame = self._published
        assert frame is not None
        self._check.sends(frame)
        try:
            reply = yield replace(self._message(message), frame=frame)
        except AtollError as error:
            self._check.refused(error)
            raise
        if not reply.receipt:
            yield WAIT_SECONDS
            return reply
        yield from self._accepted(frame)
        return reply

    def _accepted(self, frame: Frame) -> Events:
        self._sent.append(frame)
        if self._errs("duplicate", 3 * self.world.scenario.duplicate):
            yield from self._add(self._rng.choice(self._sent))
        yield from self._misbehave()
        self._check.received()

    def _upload(self, intent: intents.Upload) -> Events:
        frame = intent.frame
        whole = UploadRequest(intent.identity, frame.preamble, frame.sha256, frame.nbytes)
        about: dict[str, Any] = {"identity": intent.identity, "frame": frame}

        def stream(at: UploadRequest) -> Events:
            opened, life = yield self._call("begin", lambda c: c.begin_upload(at), **about)
            if isinstance(opened, ContributionRecord):
                return
            for start in range(at.offset, frame.nbytes, CHUNK_BYTES):
                chunk = frame.read(start, CHUNK_BYTES)
                write = partial(Coordinator.write_upload, stream=opened, chunk=chunk)
                yield self._call("write", write, life=life, identity=at.identity)
            intent.before_commit()
            yield self._call("commit", lambda c: c.commit_upload(opened), life=life, **about)

        offset = yield self._call("offset", lambda c: c.upload_offset(whole), **about)
        try:
            yield from stream(replace(whole, offset=offset % frame.nbytes))
        except FrameError:
            if not offset % frame.nbytes:
                raise
            yield from stream(whole)  # as a link does

    # What a broken island sends

    def _misbehave(self) -> Events:
        """Sends at times what must be refused: a bug of an island must not harm the run."""
        if self._given is None or not self._errs("rogue", 0.4):
            return
        assert self._rounds is not None and self._given.round is not None
        session, trained = self._rounds.session, _trained(self._given)
        header = hand_in.header_of(
            session, self._rounds.weights, self._given, trained, began=self._given.round
        )
        wrong = self._rng.choice(_wrong(header))
        label = f"{self._seed}/{self.name}/{header.round}/rogue"
        yield from self._add(standin.contribution(wrong, session.adopted.manifest, label))

    def _add(self, frame: Frame) -> Events:
        """Sends what nobody asked for; nothing may come of it."""
        assert self._rounds is not None
        standing = self._rounds.session.standing
        for _ in range(2):
            try:
                yield from self._offer(standing.identity(), frame)
            except StaleGeneration as stale:
                standing.told(stale.present)
                continue
            except AtollError:
                pass
            return

    def _offer(self, identity: Identity, frame: Frame) -> Events:
        """Hands a frame in, or announces it; nothing is published that would replace its own."""
        signing = self._signing
        if signing is None:
            yield from self._upload(intents.Upload(identity, frame, lambda: None))
            return
        stated = signings.statement_of(frame)
        place = publish.frame_key(prefix_of(stated.run_id, stated.uid), stated.sha256)
        bucket = self.servers.seen_by(LeapingClock(self.world))[signing.bucket]
        bucket.put(place, frame.data)
        said = AnnounceRequest.of(
            identity,
            preamble=frame.preamble,
            sha256=frame.sha256,
            nbytes=frame.nbytes,
            statement=signing.document(stated),
        )
        yield replace(self._message(said), frame=frame)


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
        replace(header, first=max(1, header.round - 2) % header.round),  # rows of earlier rounds
        header,  # other bytes for the same key
    )
