"""When an island makes a version itself, and what it does where that comes to nothing."""

from types import SimpleNamespace
from typing import Any

import pytest

from atoll.errors import FrameError, StoreAway, WrongRound
from atoll.gather.words import Reason, Skip
from atoll.island.conversation.gathering import gathered
from atoll.island.conversation.intents import Send
from atoll.island.gather.base import Collect
from atoll.protocol.gather import WindowReply, WindowRequest
from atoll.strategies import registry
from tests.clusters import WIDE, manifest_for
from tests.publishing import SETTINGS

MANIFEST = manifest_for(WIDE, SETTINGS)
STRATEGY = registry.of(MANIFEST)
NUMBER, PEERS = 5, 3
IDENTITY = {
    "run_id": "run-1",
    "manifest_sha256": MANIFEST.sha256(),
    "worker_id": "a",
    "island_key": "0" * 64,
    "incarnation": 1,
    "generation": 1,
}


def window() -> WindowReply:
    peer = {"key": "1" * 64, "bucket": "main", "sha256": "2" * 64, "nbytes": 9, "weight": 1}
    return WindowReply.model_validate(
        {
            "round": NUMBER,
            "base_digest": "3" * 64,
            "result_digest": "4" * 64,
            "peers": [{"worker_id": name, **peer} for name in "abc"],
        }
    )


def asked(newest: int) -> tuple[Any, object]:
    """The steps of an island that lacks version 5, and what it wants once the list is here."""
    adopted = SimpleNamespace(
        asked=STRATEGY, manifest=MANIFEST, info=SimpleNamespace(manifest_sha256="5" * 64)
    )
    session: Any = SimpleNamespace(
        call=lambda make: make(),
        adopted=adopted,
        standing=SimpleNamespace(identity=lambda: IDENTITY, info=SimpleNamespace(run_id="run-1")),
    )
    weights: Any = SimpleNamespace(layout=WIDE)
    receiver: Any = SimpleNamespace(feed=lambda _: None)
    steps = gathered(session, weights, receiver, NUMBER, newest=newest)
    first = next(steps)
    assert isinstance(first, Send) and isinstance(first.message, WindowRequest)
    assert first.message.round == NUMBER
    try:
        return steps, steps.send(window())
    except StopIteration as end:
        return steps, end.value


def ended(steps: Any, error: BaseException | None = None) -> object:
    with pytest.raises(StopIteration) as end:
        steps.send(None) if error is None else steps.throw(error)
    return end.value.value


def most_behind() -> int:
    """So many versions are still fewer bytes than the whole weights."""
    bundle = STRATEGY.bundle(WIDE, PEERS)
    assert bundle is not None
    return (WIDE.nbytes - 1) // bundle.encoded_bytes(WIDE.size)


def test_version_is_made_while_those_it_lacks_are_fewer_bytes_than_the_weights():
    steps, wanted = asked(NUMBER + most_behind() - 1)

    assert isinstance(wanted, Collect) and wanted.window == window()
    assert ended(steps) is True


def test_island_that_is_too_far_behind_takes_the_weights_whole():
    assert asked(NUMBER + most_behind())[1] is False


@pytest.mark.parametrize(
    "error", [Skip(Reason.MISSING, "gone"), StoreAway("away"), WrongRound("not yet")]
)
def test_what_could_not_be_fetched_is_downloaded(error):
    steps, _ = asked(NUMBER)

    assert ended(steps, error) is False


def test_frame_that_broke_off_is_followed_by_nothing():
    """Its receiver has got a part: a download behind it would be no frame."""
    steps, _ = asked(NUMBER)

    with pytest.raises(FrameError, match="broke off"):
        steps.throw(FrameError("broke off"))
