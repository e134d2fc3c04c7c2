"""Bringing an island one round further: the round's frame if it applies, else the whole weights."""

import logging

from atoll.errors import FrameError
from atoll.island.conversation.backoff import Backoff
from atoll.island.conversation.intents import Steps, led
from atoll.island.conversation.session import Session
from atoll.island.link.base import Download, DownloadProgress
from atoll.island.state.weights import IslandWeights
from atoll.layout import Span

log = logging.getLogger(__name__)

MAX_TRIES = 3  # of one frame; each costs a whole download


def fetch(session: Session, weights: IslandWeights) -> Steps[None]:
    """Collective: brings every rank to the next version, or the newest; the leader downloads."""

    def download() -> Steps[tuple[int, str, int, int]]:
        yield from receive(session, weights)
        assert weights.version is not None and weights.digest is not None
        return weights.version, weights.digest, weights.newest.start, weights.newest.stop

    version, digest, start, stop = yield from led(download)
    weights.adopt(version, digest, Span(start, stop))


def receive(session: Session, weights: IslandWeights) -> Steps[None]:
    """Downloads, applies and verifies; a frame that does not fit is followed by a whole one.

    The FrameError of a frame that did not fit in MAX_TRIES tries in a row passes through; tries
    are apart, so that a coordinator with a bad frame is not flooded with downloads.
    """
    tag, tries, backoff = "", 0, Backoff(session.jitter)
    while True:
        progress = DownloadProgress()
        try:
            return (yield from _try(session, weights, progress))
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


def _try(session: Session, weights: IslandWeights, progress: DownloadProgress) -> Steps[None]:
    receiver = weights.receive(run_id=session.standing.info.run_id)
    held = weights.version
    number = 0 if held is None else held + 1
    carried = session.adopted.asked.fragment(number, is_last=False)
    have = weights.base_digest(carried) if number else ""

    def download() -> Steps[None]:
        yield Download(session.standing.identity(), number, have, progress, receiver.feed)

    yield from session.call(download)
    receiver.finish()
