"""Islands: what one sends follows from what it was given and answered, over all its lives.

Looks at what an island wants to send and what it was told, never at its own notes; a `Memory`
survives with the island's disk.
"""

from dataclasses import dataclass, field

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
from atoll.layout import byte_view
from atoll.protocol.manifest import Manifest
from atoll.protocol.messages import Assignment, Identity, InfoRequest
from atoll.simulate.faults import standin
from atoll.simulate.faults.invariants.base import check
from atoll.simulate.faults.reference import Reference, digest_of
from atoll.simulate.faults.standin import Frame
from atoll.strategies import build, registry
from atoll.strategies.base import Strategy
from atoll.wire import frame as wire


@dataclass(frozen=True)
class Made:
    """A contribution that is not answered yet: its bytes, and the residual after it."""

    sha256: str
    residual: Tensor | None = field(repr=False)


@dataclass
class Memory:
    """What an island must remember: its receipts, what rounding lost, what it still has to send."""

    receipts: int = 0
    residual: Tensor | None = None  # fp32 values of bf16; None: nothing was lost yet
    unanswered: Made | None = None


class IslandCheck:
    """One life of one island."""

    def __init__(self, name: str, memory: Memory, reference: Reference) -> None:
        self._name = name
        self._memory = memory
        self._reference = reference
        self._published = torch.zeros(standin.LAYOUT.size)  # what it was given of the weights
        self._local = torch.zeros(standin.LAYOUT.size)  # the same, moved by what it trained
        self._began: int | None = None  # the round at which both were last the same
        self._trained = 0  # the last round that moved them apart
        self._given: Assignment | None = None  # trained, and not seen in a frame yet
        self._is_sending = False  # a contribution, in this life

    def asks(self) -> None:
        """It wants rows."""
        unanswered = self._memory.unanswered
        check("pending-is-resent", unanswered is None, asks_on=self._name, unanswered=unanswered)

    def trains(self, rounds: int) -> None:
        """It trains, with inner state of so many rounds."""
        right = self._memory.receipts
        check("inner-state-kept", rounds == right, of=self._name, rounds=rounds, receipts=right)

    def fetched(self, data: bytes) -> None:
        """A frame has arrived: that part of the weights is the version's, published and local."""
        header, _ = wire.parse_preamble(data)
        right = torch.from_numpy(self._reference.versions[header.round].published)
        is_whole = header.elements == len(right)
        part = self._reference.whole if is_whole else self._reference.fragment(header.round)
        if is_whole:
            # Within a round it goes on from here, and hands that in.
            self._began = None if self._given is None else self._given.round
        part.of(self._published).copy_(part.of(right))
        part.of(self._local).copy_(part.of(right))

    def trained(self, given: Assignment, delta: Tensor) -> None:
        """It has moved its weights."""
        number = given.round or 0
        if number < self._trained:
            self._local, self._began = self._published.clone(), None
        self._local = self._local - delta
        self._began, self._trained = self._began or number, number
        self._given = given

    def sends(self, frame: Frame, manifest: Manifest) -> None:
        """It wants to hand this in."""
        self._is_sending = True
        before, given = self._memory.unanswered, self._given
        is_again = before is not None and before.sha256 == frame.sha256
        if given is None:
            check("pending-is-resent", is_again, of=self._name, header=frame.header, had=before)
        elif not is_again:
            self._given = None
            self._check_header(frame, given, registry.of(manifest))
            self._memory.unanswered = self._check_payload(frame, manifest)

    def _check_header(self, frame: Frame, given: Assignment, strategy: Strategy) -> None:
        header, number = frame.header, given.round or 0
        fragment = self._reference.fragment(number)
        base = digest_of(fragment.of(self._published).numpy(), fragment.layout)
        found = (
            *(header.round, header.fragment, header.first or header.round, header.base_digest),
            *(header.manifest_sha256, tuple(header.ranges)),
        )
        wanted = (
            *(number, strategy.fragment(number), strategy.first(number, self._began or 0), base),
            *(given.manifest_sha256, tuple(given.ranges)),
        )
        is_so = found == wanted
        check("sends-what-it-was-given", is_so, of=self._name, sends=found, given=wanted)

    def _check_payload(self, frame: Frame, manifest: Manifest) -> Made:
        """The displacement and what rounding lost before it, through the codec."""
        codec = manifest.upload.build()
        fragment = self._reference.fragment(frame.header.round)
        values = fragment.of(self._published) - fragment.of(self._local)
        before = self._memory.residual
        if before is not None:
            values = values + fragment.of(before) * manifest.upload.residual_decay
        worker_id = str(frame.header.worker_id)
        noise = build.upload_noise(manifest, frame.header.round, worker_id)
        payload = codec.encode(values, noise=noise, first_group=0)
        is_same = frame.payload == bytes(byte_view(payload))
        check("residual-carried", is_same, of=self._name, other_bytes_under=frame.header)
        if not manifest.upload.keeps_residual:
            return Made(frame.sha256, None)
        lost = values - codec.decode(payload, len(values))
        after = torch.zeros(standin.LAYOUT.size) if before is None else before.clone()
        fragment.of(after).copy_(lost.bfloat16().float())
        return Made(frame.sha256, after)

    def received(self) -> None:
        """There is a receipt."""
        made = self._memory.unanswered
        assert made is not None
        self._memory.receipts += 1
        self._memory.residual = made.residual
        self._settle()

    def refused(self, error: AtollError) -> None:
        """An upload came to nothing; one that was refused for good is given up."""
        is_over = isinstance(error, (ProtocolError, RoundError, LeaseLost)) and not error.retry
        # Under another manifest the same is sent again.
        if is_over and not isinstance(error, ManifestMismatch):
            self._local, self._began = self._published.clone(), None
            self._settle()

    def ended(self, error: AtollError) -> None:
        """Its process ends; a frame that was refused for what it holds is not sent again."""
        if self._is_sending and isinstance(error, ProtocolError):
            self._settle()

    def _settle(self) -> None:
        self._is_sending = False
        self._memory.unanswered = None


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
