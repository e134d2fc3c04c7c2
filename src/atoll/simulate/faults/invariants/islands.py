"""Islands: what one sends follows from what it was given and answered, over all its lives.

Looks at what an island wants to send and what it was told, never at its own notes; a `Memory`
survives with the island's disk.
"""

import copy
import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from atoll.errors import (
    AtollError,
    LeaseLost,
    ManifestMismatch,
    ProtocolError,
    RoundError,
    StaleGeneration,
    UnknownWorker,
)
from atoll.protocol.manifest import Manifest
from atoll.protocol.messages import Assignment, Identity, InfoRequest
from atoll.simulate.faults import payloads, standin
from atoll.simulate.faults.invariants.base import check
from atoll.simulate.faults.payloads import Lane
from atoll.simulate.faults.reference import Reference, digest_of
from atoll.simulate.faults.standin import Frame
from atoll.strategies import registry
from atoll.strategies.base import ALL, Strategy
from atoll.wire import frame as wire


@dataclass(frozen=True)
class Made:
    """A contribution that is not answered yet: its bytes, and the residual after it."""

    sha256: str
    round: int
    residual: Tensor | None = field(repr=False)
    course: "Course | None" = field(repr=False)  # that was saved with it


@dataclass
class Memory:
    """What an island must remember: its receipts, what rounding lost, what it still has to send."""

    receipts: int = 0
    residual: Tensor | None = None  # fp32 values of bf16; None: nothing was lost yet
    left_by: int = 0  # the round of the contribution that left it
    unanswered: list[Made] = field(default_factory=list)  # oldest first
    course: "Course | None" = None  # that was saved with the last receipt


@dataclass
class Course:
    """Where an island's own weights stand."""

    local: Tensor
    began: int  # the round at which they were last the published ones
    trained: int  # the last round that moved them
    newest: int  # that was handed in
    merged: int  # the version up to which they have taken the published ones in


@dataclass
class HandedOver:
    """A round that was trained whole: it is encoded when its turn comes, as it was then."""

    given: Assignment
    course: Course
    base: Tensor  # the published weights at that moment


class IslandCheck:
    """One life of one island."""

    def __init__(self, name: str, memory: Memory, reference: Reference) -> None:
        self._name = name
        self._memory = memory
        self._reference = reference
        self._published = torch.zeros(standin.LAYOUT.size)  # what it was given of the weights
        self._version = 0  # of these
        # Its own, moved by what it trained; a life that goes on has saved them.
        saved = [memory.course, *(made.course for made in memory.unanswered)]
        self._course = copy.deepcopy(saved[-1])
        self._handed = len(memory.unanswered)  # rounds trained whose answer is not here
        self._given: Assignment | None = None  # trained, and not seen in a frame yet
        self._step = 0  # of the round that it trains
        # Where it set out since it last trained: more may be here when the training begins.
        self._start: tuple[Tensor, int] | None = None
        self._made: list[HandedOver] = []  # oldest first
        self._is_sending = False  # a contribution, in this life
        self._is_refused = False  # and the training has not been seen to go back yet
        self._is_doomed = False  # what is trained follows on something that was refused

    @property
    def in_flight(self) -> int:
        """How many rounds it has handed in since it set out, and not merged."""
        course = self._course
        return 0 if course is None else max(0, course.newest - max(course.merged, course.began - 1))

    def asks(self, manifest: Manifest) -> None:
        """It wants rows."""
        left, most = self._memory.unanswered, registry.of(manifest).in_flight
        check("pending-is-resent", len(left) <= most, asks_on=self._name, unanswered=left)

    def trains(self, given: Assignment, rounds: int, manifest: Manifest) -> None:
        """It begins a round, with inner state of so many rounds."""
        if self._made and self._reference.carried(self._made[-1].given.round or 0) == ALL:
            # The last round, whose hand-in waits for all before it: it was called away from that.
            trained = self._made.pop().course
            self._handed -= 1
            if self._course is not None:
                self._course.newest = trained.newest
        right = self._memory.receipts + self._handed
        strategy, self._given, self._step = registry.of(manifest), given, 0
        goes_on = strategy.in_flight  # before an answer is here
        if self._is_refused and goes_on and rounds != right:
            self._is_doomed = True  # it has not looked yet, and must hand in nothing of this
            return
        self._is_refused = self._is_doomed = False
        check("inner-state-kept", rounds == right, of=self._name, rounds=rounds, right=right)
        self._place(given.round or 0, strategy)
        self._start = None

    def _place(self, number: int, strategy: Strategy) -> None:
        """The published weights, or its own where they hold all that the round will count."""
        course = self._course
        goes_on = course is not None and course.trained == course.newest < number
        if course is not None and goes_on and self._can_merge(course):
            goes_on = not strategy.keeps_local or number == course.trained + 1
            if goes_on:
                self._merge(course, self._reference.rules.merged_before(number))
                course.trained = number
                return
        newest = 0 if course is None else course.newest
        local, version = self._start or (self._published.clone(), self._version)
        self._course = Course(local, number, number, newest, version)

    def _can_merge(self, course: Course) -> bool:
        moved = [self._reference.carried(n) for n in range(course.merged + 1, self._version + 1)]
        return len(set(moved)) == len(moved) and (ALL not in moved or len(moved) == 1)

    def _merge(self, course: Course, last: int) -> None:
        """alpha*local + (1-alpha)*published, of each round's fragment as of that very version."""
        alpha, versions = self._reference.rules.own, self._reference.versions
        own, rest = (torch.tensor(share, dtype=torch.float32) for share in (alpha, 1.0 - alpha))
        for number in range(course.merged + 1, last + 1):
            is_there = number < len(versions)
            check("local-by-rule", is_there, of=self._name, merges=number, published=len(versions))
            part = self._reference.fragment(number)
            theirs = part.of(torch.from_numpy(versions[number].published))
            mixed = part.of(course.local) * own + theirs * rest
            part.of(course.local).copy_(mixed if alpha else theirs)
            course.merged = number

    def fetched(self, data: bytes) -> None:
        """A frame has arrived: that part of the published weights is the version's."""
        header, _ = wire.parse_preamble(data)
        right = torch.from_numpy(self._reference.versions[header.round].published)
        is_whole = header.elements == len(right)
        part = self._reference.whole if is_whole else self._reference.fragment(header.round)
        part.of(self._published).copy_(part.of(right))
        self._version = header.round

    def sets_out(self) -> None:
        """It takes the published weights that are here for its own."""
        self._start = (self._published.clone(), self._version)

    def trained(self, delta: Tensor, local: Tensor) -> None:
        """It has moved its weights by a step, to `local`; what is due after it comes next."""
        if not self._is_doomed and self._course is not None:
            self._take_in(self._course)
            self._course.local = self._course.local - delta
            self._step += 1
            self._check_local(self._course, local)

    def _take_in(self, course: Course) -> None:
        """What was due after the last step is merged now: the island has waited for it."""
        for number in self._reference.rules.merged_after(course.trained, self._step):
            self._merge(course, number)

    def _check_local(self, course: Course, local: Tensor) -> None:
        is_same = course.local.numpy().tobytes() == local.numpy().tobytes()
        where = {"round": course.trained, "step": self._step, "merged": course.merged}
        check("local-by-rule", is_same, of=self._name, **where, began=course.began)

    def hands_over(self, given: Assignment, local: Tensor) -> None:
        """A round is trained whole."""
        if not self._is_doomed and self._course is not None:
            self._take_in(self._course)
            self._check_local(self._course, local)
            self._handed += 1
            course, published = copy.deepcopy(self._course), self._published.clone()
            self._made.append(HandedOver(given, course, published))
            self._course.newest = max(self._course.newest, given.round or 0)

    def sends(self, frame: Frame) -> None:
        """It wants to hand this in."""
        self._is_sending = True
        left = self._memory.unanswered
        is_in_turn = bool(left) and left[0].sha256 == frame.sha256
        check("pending-is-resent", is_in_turn, of=self._name, header=frame.header, had=left)

    def makes(self, frame: Frame, manifest: Manifest) -> None:
        """It has made a contribution, and saved it."""
        unanswered = self._memory.unanswered
        is_in_turn = bool(self._made) and not unanswered
        check("pending-is-resent", is_in_turn, of=self._name, header=frame.header, had=unanswered)
        made = self._made.pop(0)
        given, course = made.given, made.course
        strategy = registry.of(manifest)
        if self._reference.carried(given.round or 0) == ALL:
            self._merge(course, (given.round or 0) - 1)
            made.base = self._published  # it waited for these
        self._check_header(frame, made)
        course.newest = max(course.newest, given.round or 0)
        saved = course if strategy.keeps_local else None
        residual = self._check_payload(frame, manifest, made)
        self._check_stated(frame, residual)
        unanswered.append(Made(frame.sha256, frame.header.round, residual, saved))

    def _check_header(self, frame: Frame, made: "HandedOver") -> None:
        given = made.given
        header, number = frame.header, given.round or 0
        fragment = self._reference.fragment(number)
        base = digest_of(fragment.of(made.base).numpy(), fragment.layout)
        found = (
            *(header.round, header.fragment, header.first or header.round, header.base_digest),
            *(header.manifest_sha256, tuple(header.ranges)),
        )
        wanted = (
            *(number, self._reference.carried(number)),
            *(self._reference.rules.first(number, made.course.began), base),
            *(given.manifest_sha256, tuple(given.ranges)),
        )
        is_so = found == wanted
        check("sends-what-it-was-given", is_so, of=self._name, sends=found, given=wanted)

    def _check_payload(self, frame: Frame, manifest: Manifest, made: "HandedOver") -> Tensor | None:
        """The displacement and what rounding lost before it, through the codec; what it loses."""
        header, settings = frame.header, manifest.upload.model_dump(mode="json")
        fragment = self._reference.fragment(header.round)
        values = (fragment.of(made.base) - fragment.of(made.course.local)).numpy()
        before = self._memory.residual
        if before is not None:
            values = values + fragment.of(before).numpy() * np.float32(settings["decay"])
        lane = Lane(manifest.seed, header.round, f"upload/{header.worker_id}")
        payload = payloads.encode(values, settings, lane)
        check("residual-carried", frame.payload == payload, of=self._name, other_under=header)
        if not settings.get("error_feedback", False):
            return None
        lost = values - payloads.decode(payload, settings, len(values))
        after = torch.zeros(standin.LAYOUT.size) if before is None else before.clone()
        fragment.of(after).copy_(torch.from_numpy(payloads.to_bf16(lost)))
        return after

    def _check_stated(self, frame: Frame, residual: Tensor | None) -> None:
        """Of the whole model: what would be lost with the island."""
        squares = [] if residual is None else [value * value for value in residual.tolist()]
        right = (math.sqrt(math.fsum(squares)), self._memory.left_by)
        found = (frame.header.residual, frame.header.carried)
        is_so = math.isclose(found[0], right[0], rel_tol=1e-12) and found[1] == right[1]
        check("residual-stated", is_so, of=self._name, says=found, right=right)

    def received(self) -> None:
        """There is a receipt."""
        made = self._memory.unanswered.pop(0)
        self._memory.receipts += 1
        self._memory.residual, self._memory.course = made.residual, made.course
        self._memory.left_by = 0 if made.residual is None else made.round
        self._handed -= 1
        self._is_sending = False

    def refused(self, error: AtollError) -> None:
        """An upload came to nothing; one that was refused for good is given up, and what follows.

        It sets out anew.
        """
        is_over = isinstance(error, (ProtocolError, RoundError, LeaseLost)) and not error.retry
        # Under another manifest the same is sent again.
        if is_over and not isinstance(error, ManifestMismatch):
            self._drop()
            self._is_refused = True

    def ended(self, error: AtollError) -> None:
        """Its process ends; a frame that was refused for what it holds is not sent again."""
        if self._is_sending and isinstance(error, ProtocolError):
            self._drop()

    def _drop(self) -> None:
        self._is_sending = False
        self._handed, self._made, self._course = 0, [], None
        self._memory.unanswered = []


class ThreadCheck:
    """One of an island's threads: what it says after a refusal."""

    def __init__(self, *, trains: bool) -> None:
        self._trains = trains
        self._generation = 0
        self._out: int | None = None  # the incarnation that the coordinator does not know

    def says(self, message: object, identity: Identity | None) -> None:
        """The next message."""
        if identity is not None:
            told = self._generation
            check("generation-adopted", identity.generation >= told, speaks=identity, told=told)
            is_out = self._trains and identity.incarnation == self._out
            check("evicted-comes-back", not is_out, speaks=identity, says=type(message).__name__)
        if not isinstance(message, InfoRequest):
            self._generation, self._out = 0, None

    def told(self, error: AtollError, identity: Identity | None) -> None:
        """What the message came to."""
        if isinstance(error, StaleGeneration):
            self._generation = error.present
        if isinstance(error, UnknownWorker) and identity is not None:
            self._out = identity.incarnation
