"""Handing in by pull: publish, then announce until the coordinator has pulled it, or refuses it."""

import logging

from atoll.errors import ObjectRefused, StoreError
from atoll.island.conversation.asking import WAIT_SECONDS
from atoll.island.conversation.backoff import Backoff
from atoll.island.conversation.intents import Steps, send
from atoll.island.conversation.session import Session
from atoll.island.gather import signing as signings
from atoll.island.gather.base import Publish
from atoll.island.gather.signing import Signing
from atoll.island.link.base import FrameSource, Work
from atoll.protocol.gather import AnnounceReply, AnnounceRequest

log = logging.getLogger(__name__)

MAX_TRIES = 6  # to publish before it is announced all the same: some seconds


def announced(session: Session, signing: Signing, frame: FrameSource, saved: Work) -> Steps[str]:
    """Publishes and announces `frame`; the receipt.

    `saved` comes first: once a statement can be read, a later life must have the same frame.
    """
    saved()
    stated = signings.statement_of(frame)
    document = signing.document(stated)
    wanted = Publish(frame, stated, session.adopted.manifest.gather)

    def announce() -> Steps[AnnounceReply]:
        said = AnnounceRequest.of(
            session.standing.identity(),
            preamble=frame.preamble,
            sha256=frame.sha256,
            nbytes=frame.nbytes,
            statement=document,
            wait_seconds=WAIT_SECONDS,
        )
        return (yield from send(said))

    is_published = False
    while True:
        is_published = is_published or (yield from _published(session, wanted))
        reply = yield from session.call(announce)
        if reply.receipt:
            return reply.receipt
        log.info("contribution waits", extra={"round": stated.window, "for": reply.waits_for})


def _published(session: Session, wanted: Publish) -> Steps[bool]:
    """Whether it is in the bucket; one that is away for long is for the coordinator to judge."""
    backoff = Backoff(session.jitter)
    for _ in range(MAX_TRIES):
        try:
            yield wanted
            return True
        except ObjectRefused:
            raise  # asking again does not help: credentials, or the bucket's own rules
        except StoreError as error:
            log.warning("publishing again", extra={"code": error.code, "reason": str(error)})
        yield from backoff.pause()
    return False
