"""Handing in a round: encode, persist, upload, and what the answer means for what is saved.

`prepare` takes what is handed in from the training; everything after it is the leader's alone and
may go on beside the training.
"""

import logging
from dataclasses import asdict, dataclass
from typing import Protocol

from atoll.codecs.base import Codec
from atoll.codecs.noise import Noise
from atoll.errors import (
    Conflict,
    LeaseLost,
    ProtocolError,
    StaleContribution,
    WrongBase,
    WrongRound,
)
from atoll.island.conversation.announcing import announced
from atoll.island.conversation.intents import Persist, Steps, Trained, Upload
from atoll.island.conversation.session import Session
from atoll.island.link.base import Work
from atoll.island.state import encoding
from atoll.island.state.base import Frame, Saved
from atoll.island.state.continuity import Captured, Continuity
from atoll.island.state.weights import IslandWeights, Staged
from atoll.layout import Fragment
from atoll.protocol.messages import Assignment
from atoll.strategies import build
from atoll.wire.header import FrameHeader, Told

log = logging.getLogger(__name__)

# The round is over, or its rows are somebody else's: the island goes on from the new version.
_ROUND_IS_OVER = (StaleContribution, Conflict, LeaseLost, WrongBase, WrongRound)


class Held(Protocol):
    """The published weights that an island holds, as far as a header speaks of them."""

    def fragment(self, number: int) -> Fragment:
        """The fragment of that number, or the whole model."""
        ...

    def base_digest(self, number: int) -> str:
        """The digest of that fragment."""
        ...


@dataclass(frozen=True)
class Fresh:
    """A contribution that was just trained: what it is made of, and the state that goes with it."""

    header: FrameHeader
    staged: Staged
    captured: Captured
    codec: Codec
    noise: Noise

    @property
    def round(self) -> int:
        return self.header.round


HandIn = Fresh | Saved  # or one that an earlier life has saved with its frame


def header_of(
    session: Session,
    weights: Held,
    given: Assignment,
    trained: Trained,
    *,
    began: int,
    tokens: int | None = None,
) -> FrameHeader:
    """The header of a contribution: `trained` is what was done on the rows of `given`.

    The island set out from published weights at the start of round `began`. `tokens` are those of
    all rounds whose rows are in it, which is what it weighs; None: its own round's.
    """
    assert given.round is not None
    info, standing, strategy = session.adopted.info, session.standing, session.adopted.asked
    carried, first = given.fragment, strategy.first(given.round, began)
    return Told(
        kind="contribution",
        run_id=info.run_id,
        manifest_sha256=info.manifest_sha256,
        round=given.round,
        worker_id=standing.island.worker_id,
        incarnation=standing.incarnation,
        base_digest=weights.base_digest(carried),
        fragment=carried,
        first=0 if first == given.round else first,
        weight=strategy.weight(tokens=trained.tokens if tokens is None else tokens),
        ranges=given.ranges,
        **asdict(trained),
    ).header(weights.fragment(carried).layout, session.adopted.upload)


def prepare(
    session: Session,
    continuity: Continuity,
    weights: IslandWeights,
    header: FrameHeader,
    *,
    copies: bool,
    course: dict[str, object],
) -> Fresh:
    """What is to be handed in, taken from the training; with `copies` it may go on at once."""
    manifest, island = session.adopted.manifest, session.standing.island
    local = weights.local if session.adopted.asked.keeps_local else None
    return Fresh(
        header,
        weights.stage(header.fragment, copies=copies),
        continuity.capture(copies=copies, local=local, course=course),
        session.adopted.upload,
        build.upload_noise(manifest, header.round, island.worker_id),
    )


def contribute(session: Session, continuity: Continuity, made: HandIn) -> Steps[bool]:
    """Saves and sends what was handed in; whether it was accepted. The leader's alone."""
    if isinstance(made, Saved):
        frame = continuity.frame(made.round, made.meta)
        return (yield from _settled(session, continuity, made.round, frame, _nothing))
    path = continuity.begin(made.round)
    with continuity.writing(path) as file, continuity.feedback(path, made.round) as feed:
        encoded = encoding.encode(
            made.staged, made.header, file, codec=made.codec, feed=feed, noise=made.noise
        )
    described = continuity.describe(encoded.preamble, encoded.sha256)
    # The frame travels while it is being synced here; only the commit waits for that.
    saved = yield Persist(lambda: continuity.save(path, described, made.captured))
    frame = continuity.frame(made.round, described)
    return (yield from _settled(session, continuity, made.round, frame, saved))


def _nothing() -> None:
    """Stands for work where there is none."""


def _settled(
    session: Session, continuity: Continuity, round_number: int, frame: Frame, saved: Work
) -> Steps[bool]:
    """Sends `frame`; a receipt makes what was saved with it the checkpoint. Whether there is one.

    After a refusal nothing is sent again, by this life or a later one.
    """

    def upload() -> Steps[str]:
        receipt: str = yield Upload(session.standing.identity(), frame, saved)
        return receipt

    def deliver() -> Steps[str]:
        if session.signing is not None:
            return announced(session, session.signing, frame, saved)
        return session.call(upload)

    try:
        try:
            receipt = yield from deliver()
        finally:
            frame.close()
            saved()  # nothing is rolled back, and nobody goes, while it is still being saved
    except _ROUND_IS_OVER as error:
        about = {"code": error.code, "reason": str(error)}
        log.warning("contribution refused, its rows go to a later round", extra=about)
        continuity.discard()
        return False
    except ProtocolError:
        # Refused for what it holds: the next life must not send it again.
        continuity.discard()
        raise
    log.info("contribution accepted", extra={"receipt": receipt})
    continuity.promote(round_number)
    return True
