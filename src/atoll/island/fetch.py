"""Bringing an island to the published version: the update if it applies, else the whole weights."""

import logging

from atoll.errors import FrameError
from atoll.island.link.base import DownloadProgress
from atoll.island.link.session import Session
from atoll.island.state.weights import IslandWeights

log = logging.getLogger(__name__)

MAX_TRIES = 3  # of one frame; each costs a whole download


def fetch(session: Session, weights: IslandWeights) -> None:
    """Downloads, applies and verifies; a frame that does not fit is followed by a whole one.

    The FrameError of a frame that did not fit in MAX_TRIES tries in a row passes through; tries
    are apart, so that a coordinator with a bad frame is not flooded with downloads.
    """
    tag, tries, backoff = "", 0, session.backoff()
    while True:
        progress = DownloadProgress()
        try:
            return _receive(session, weights, progress)
        except FrameError as error:
            if progress.tag != tag:
                # A coordinator that goes on to another frame is no reason to give up.
                tag, tries, backoff = progress.tag, 0, session.backoff()
            tries += 1
            weights.forget()
            if tries == MAX_TRIES:
                raise
            log.warning("download refused, fetching whole", extra={"reason": str(error)})
            backoff.pause()


def _receive(session: Session, weights: IslandWeights, progress: DownloadProgress) -> None:
    receiver = weights.receive(run_id=session.info.run_id)
    have_digest = weights.digest or ""

    def download() -> None:
        session.link.download(
            session.identity(), have_digest=have_digest, progress=progress, sink=receiver.feed
        )

    session.call(download)
    receiver.finish()
