"""Handing in a round: encode, persist, upload, and what the answer means for the inner state.

Followers of a group are durable before the leader sends, and do as it did.
"""

import logging
from dataclasses import asdict
from functools import partial
from typing import Protocol

from atoll.errors import (
    Conflict,
    LeaseLost,
    ProtocolError,
    StaleContribution,
    WrongBase,
    WrongRound,
)
from atoll.island.conversation.intents import Persist, Steps, Trained, Upload, decided, led
from atoll.island.conversation.session import Session
from atoll.island.link.base import Work
from atoll.island.ranks.group import Group
from atoll.island.state import encoding
from atoll.island.state.base import Frame, Saved
from atoll.island.state.continuity import Continuity
from atoll.island.state.weights import IslandWeights
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


def header_of(
    session: Session, weights: Held, given: Assignment, trained: Trained, *, began: int
) -> FrameHeader:
    """The header of a contribution: `trained` is what was done on the rows of `given`.

    The island set out from published weights at the start of round `began`.
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
        weight=strategy.weight(tokens=trained.tokens),
        ranges=given.ranges,
        **asdict(trained),
    ).header(weights.fragment(carried).layout, session.adopted.upload)


def hand_in(
    session: Session, continuity: Continuity, weights: IslandWeights, header: FrameHeader
) -> Steps[bool]:
    """Collective: hands the round in, and says whether it was accepted.

    If not, the inner state goes back to that of the last accepted round.
    """
    weights.gather()
    _followers(session.group, lambda: continuity.save_part(header.round))
    accepted = yield from led(lambda: contribute(session, continuity, weights, header))
    _followers(session.group, lambda: continuity.settle(header.round, accepted=accepted))
    return accepted


def _followers(group: Group, work: Work) -> None:
    """Collective: each rank but the leader does `work`."""
    group.together(_nothing if group.is_leader else work)


def _nothing() -> None:
    """Stands for work where there is none."""


def contribute(
    session: Session, continuity: Continuity, weights: IslandWeights, header: FrameHeader
) -> Steps[bool]:
    """The leader's part of handing in: encodes, saves and sends; whether it was accepted."""
    manifest = session.adopted.manifest
    noise = build.upload_noise(manifest, header.round, session.standing.island.worker_id)
    path = continuity.begin(header.round)
    with continuity.writing(path) as file, continuity.feedback(path) as feed:
        encoded = encoding.encode(
            weights, header, file.write, codec=session.adopted.upload, feed=feed, noise=noise
        )
    described = continuity.describe(encoded.preamble, encoded.sha256)
    captured = continuity.capture()
    # The frame travels while it is being synced here; only the commit waits for that.
    saved = yield Persist(lambda: continuity.save(path, described, captured))
    frame = continuity.frame(header.round, described)
    promote = partial(continuity.promote, header.round)
    return (yield from _settled(session, continuity, frame, saved, promote))


def resume(session: Session, continuity: Continuity) -> Steps[None]:
    """Collective: continues what an earlier life left, on all ranks or on none."""
    group = session.group
    found: Saved | None = None

    def read() -> tuple[int | None, int | None]:
        nonlocal found
        found = continuity.resume(version=session.standing.version, lead=session.adopted.asked.lead)
        return continuity.rounds()

    checkpoint, pending = yield from decided(read)
    fits = group.together(lambda: group.is_leader or continuity.fall_in(checkpoint, pending))
    if not all(one for (one,) in group.gather([fits])):
        log.warning("the ranks' states are not of one round and are dropped")
        group.together(continuity.drop)
        return
    if pending is None:
        return
    accepted = yield from led(lambda: _resend(session, continuity, found))
    _followers(group, lambda: continuity.settle_resent(accepted=accepted))


def _resend(session: Session, continuity: Continuity, pending: Saved | None) -> Steps[bool]:
    """Sends a frame that an earlier life has saved; whether the contribution was accepted."""
    assert pending is not None, "only a pending round is sent again"
    frame = continuity.frame(pending.round, pending.meta)
    promote = partial(continuity.adopt_pending, pending)
    return _settled(session, continuity, frame, _nothing, promote)


def _settled(
    session: Session, continuity: Continuity, frame: Frame, saved: Work, promote: Work
) -> Steps[bool]:
    """Sends `frame`, then promotes or rolls back; whether it was accepted."""

    def upload() -> Steps[str]:
        receipt: str = yield Upload(session.standing.identity(), frame, saved)
        return receipt

    try:
        try:
            receipt = yield from session.call(upload)
        finally:
            frame.close()
            saved()  # nothing is rolled back, and nobody goes, while it is still being saved
    except _ROUND_IS_OVER as error:
        about = {"code": error.code, "reason": str(error)}
        log.warning("contribution refused, its rows go to a later round", extra=about)
        continuity.roll_back()
        return False
    except ProtocolError:
        # Refused for what it holds: the next life must not send it again.
        continuity.roll_back()
        raise
    log.info("contribution accepted", extra={"receipt": receipt})
    promote()
    return True
