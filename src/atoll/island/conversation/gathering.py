"""The next version by an island's own gather of the contributions that the round has folded."""

import logging

from atoll.errors import AtollError, FrameError
from atoll.island.conversation.intents import Steps, send
from atoll.island.conversation.session import Session
from atoll.island.gather.base import Collect
from atoll.island.state.weights import IslandWeights, Receiver
from atoll.protocol.gather import WindowReply, WindowRequest

log = logging.getLogger(__name__)


def gathered(
    session: Session, weights: IslandWeights, receiver: Receiver, number: int, *, newest: int
) -> Steps[bool]:
    """Feeds version `number` to the receiver; False, and nothing was fed, where it is not to be.

    Of an island that is so far behind that whole weights are fewer bytes, it is not. FrameError
    where the receiver has got a part of it.
    """

    def ask() -> Steps[WindowReply]:
        said = WindowRequest(identity=session.standing.identity(), round=number)
        return (yield from send(said))

    try:
        window = yield from session.call(ask)
        layout = weights.layout
        bundle = session.adopted.asked.bundle(layout, len(window.peers))
        behind = newest - number + 1
        if bundle is None or bundle.encoded_bytes(layout.size) * behind >= layout.nbytes:
            return False
        yield _wanted(session, weights, window, receiver)
    except FrameError:
        raise
    except AtollError as error:
        about = {"version": number, "code": error.code, "reason": str(error)}
        log.warning("not gathered, taking the coordinator's frame", extra=about)
        return False
    return True


def _wanted(
    session: Session, weights: IslandWeights, window: WindowReply, receiver: Receiver
) -> Collect:
    adopted = session.adopted
    return Collect(
        window,
        run_id=session.standing.info.run_id,
        manifest_sha256=adopted.info.manifest_sha256,
        layout=weights.layout,
        asked=adopted.asked,
        settings=adopted.manifest.gather,
        sink=receiver.feed,
    )
