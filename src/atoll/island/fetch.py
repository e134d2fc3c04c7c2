"""Bringing an island to the published version: the update if it applies, else the whole weights."""

import logging

from atoll.errors import FrameError
from atoll.island.link import DownloadProgress
from atoll.island.session import Session
from atoll.island.weights import IslandWeights

log = logging.getLogger(__name__)


def fetch(session: Session, weights: IslandWeights) -> None:
    """Downloads, applies and verifies; a frame that does not fit is followed by a whole one."""
    while not _try(session, weights):
        weights.forget()


def _try(session: Session, weights: IslandWeights) -> bool:
    receiver, progress = weights.receive(), DownloadProgress()
    have_digest = weights.digest or ""

    def download() -> None:
        session.link.download(
            session.identity(), have_digest=have_digest, progress=progress, sink=receiver.feed
        )

    try:
        session.call(download)
        receiver.finish()
    except FrameError as error:
        log.warning("download refused, fetching whole", extra={"reason": str(error)})
        return False
    return True
