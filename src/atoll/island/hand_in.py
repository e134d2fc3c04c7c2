"""Handing in a round: encode, persist, upload, and what the answer means for the inner state."""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

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
from atoll.island.link.session import Session
from atoll.island.state import encoding
from atoll.island.state.continuity import Continuity
from atoll.island.state.store import Saved, StoredFrame
from atoll.island.state.weights import IslandWeights
from atoll.wire.header import FrameHeader

log = logging.getLogger(__name__)

# The round is over, or its rows are somebody else's: the island goes on from the new version.
_ROUND_IS_OVER = (StaleContribution, Conflict, LeaseLost, WrongBase, WrongRound)


def contribute(
    session: Session,
    continuity: Continuity,
    weights: IslandWeights,
    header: FrameHeader,
    *,
    codec: Codec,
    noise: Noise,
) -> bool:
    """Whether the contribution is in; if not, the inner state is the last accepted round's."""
    path = continuity.begin(header.round)
    with continuity.writing(path) as file, continuity.feedback(path) as feed:
        encoded = encoding.encode(weights, header, file.write, codec=codec, feed=feed, noise=noise)
    described = continuity.describe(encoded.preamble, encoded.sha256)
    # Left in this order: nothing is rolled back while the other thread still saves.
    with _rolled_back_when_refused(continuity), ThreadPoolExecutor(1) as pool:
        saving = pool.submit(continuity.save, path, described, continuity.capture())
        frame = continuity.frame(header.round, described)
        # The frame travels while it is being synced here; only the commit waits for that.
        accepted = _send(session, frame, before_commit=saving.result)
        saving.result()
    if accepted:
        continuity.promote(header.round)
    else:
        continuity.roll_back()
    return accepted


def resend(session: Session, continuity: Continuity, pending: Saved) -> bool:
    """Takes up a frame that an earlier life had persisted; whether the contribution is in."""
    frame = continuity.frame(pending.round, pending.meta)
    with _rolled_back_when_refused(continuity):
        accepted = _send(session, frame, before_commit=lambda: None)
    if accepted:
        continuity.adopt_pending(pending)
    else:
        continuity.roll_back()
    return accepted


@contextmanager
def _rolled_back_when_refused(continuity: Continuity) -> Iterator[None]:
    """A frame that is refused for what it holds must not be resent by the next life."""
    try:
        yield
    except ProtocolError:
        continuity.roll_back()
        raise


def _send(session: Session, frame: StoredFrame, *, before_commit: Callable[[], None]) -> bool:
    try:
        receipt = session.call(
            lambda: session.link.upload(session.identity(), frame, before_commit=before_commit)
        )
    except _ROUND_IS_OVER as error:
        log.warning(
            "contribution refused, its rows go to a later round",
            extra={"code": error.code, "reason": str(error)},
        )
        return False
    finally:
        frame.close()
    log.info("contribution accepted", extra={"receipt": receipt})
    return True
