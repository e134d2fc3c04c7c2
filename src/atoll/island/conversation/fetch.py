"""Bringing an island one round further: the round's frame if it applies, else the whole weights."""

import logging

from atoll.errors import FrameError
from atoll.island.conversation.backoff import Backoff
from atoll.island.conversation.gathering import gathered
from atoll.island.conversation.intents import Steps
from atoll.island.conversation.session import Session
from atoll.island.link.base import Download, DownloadProgress
from atoll.island.state.weights import IslandWeights

log = logging.getLogger(__name__)

MAX_TRIES = 3  # of one frame; each costs a whole download


def receive(session: Session, weights: IslandWeights, *, newest: int = 0) -> Steps[None]:
    """Downloads, applies and verifies; a frame that does not fit is followed by a whole one.

    Where islands publish into buckets, it makes the frame of the next version itself if it can;
    `newest` is the newest version that it knows of.

    The leader's alone. The FrameError of a frame that did not fit in MAX_TRIES tries in a row
    passes through; tries are apart, so that a coordinator with a bad frame is not flooded with
    downloads.
    """
    tag, tries, backoff = "", 0, Backoff(session.jitter)
    while True:
        progress = DownloadProgress()
        try:
            return (yield from _try(session, weights, progress, newest))
        except FrameError as error:
            if progress.tag != tag:
                # A coordinator that goes on to another frame is no reason to give up.
                tag, tries, backoff = progress.tag, 0, Backoff(session.jitter)
            tries += 1
            weights.forget()
            if tries == MAX_TRIES:
                raise
            log.warning("download refused, fetching whole", extra={"reason": str(error)})
        yield from backoff.pause()


def _try(
    session: Session, weights: IslandWeights, progress: DownloadProgress, newest: int
) -> Steps[None]:
    receiver = weights.receive(run_id=session.standing.info.run_id)
    held, _ = weights.held
    number = 0 if held is None else held + 1
    have = weights.base_digest(weights.carried(number)) if number else ""

    def download() -> Steps[None]:
        yield Download(session.standing.identity(), number, have, progress, receiver.feed)

    is_made = False
    if number and session.signing is not None:
        is_made = yield from gathered(session, weights, receiver, number, newest=newest)
    if not is_made:
        yield from session.call(download)
    receiver.finish()
