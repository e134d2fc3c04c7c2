"""Handing in a round: what is on disk after a refusal that came while the frame was being saved."""

import errno
import hashlib
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from atoll.codecs.bf16.codec import Bf16
from atoll.codecs.noise import Noise
from atoll.errors import DiskFailed, FrameError, StaleContribution, StorageFull
from atoll.ids import WorkerId
from atoll.island.conversation import hand_in
from atoll.island.conversation.hand_in import Fresh
from atoll.island.link.base import FrameSource
from atoll.island.state.continuity import LOCAL_WEIGHTS, Captured, Continuity
from atoll.island.state.store import IslandStore
from atoll.island.state.weights import IslandWeights
from atoll.models import registry as models
from atoll.protocol.messages import Info
from atoll.strategies.diloco.sync import Sync
from atoll.wire.header import Told
from tests import links
from tests.clusters import SMALL, info_of, manifest_for
from tests.frames import ranges
from tests.links import Driven

NAME = WorkerId("a")
PATIENCE_SECONDS = 0.2


class Killed(Exception):
    """Ends an island while what it hands in is on its way."""


class Refusing(links.Answering):
    """A link that answers every upload at once, without waiting for the island's own copy."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    def info(self, _: Any) -> Info:
        return info()

    def upload(self, *_: Any, **__: Any) -> str:
        if self._error is not None:
            raise self._error
        return "receipt"


def info() -> Info:
    upload = {"upload.codec": "bf16", "upload.error_feedback": False}
    return info_of(manifest_for(SMALL, upload)).model_copy(update={"run_id": "run"})


class SlowToSave(Continuity):
    """Saves only after it has given a premature end of the round the time to happen."""

    def watch(self) -> None:
        self.events: list[str] = []
        self._settled = threading.Event()

    def save(self, path: Path, frame: dict[str, Any], captured: Captured) -> None:
        self._settled.wait(PATIENCE_SECONDS)
        super().save(path, frame, captured)
        self.events.append("saved")

    def discard(self) -> None:
        self._settle("discarded")
        super().discard()

    def promote(self, round_number: int) -> None:
        self._settle("promoted")
        super().promote(round_number)

    def _settle(self, how: str) -> None:
        self.events.append(how)
        self._settled.set()


@pytest.fixture
def store(tmp_path: Path):
    made = IslandStore(tmp_path / "island")
    yield made
    made.close()


@pytest.fixture
def continuity(store: IslandStore) -> SlowToSave:
    made = SlowToSave(store, info(), worker_id=NAME, elements=18)
    made.watch()
    made.start(None)
    return made


def made_by(continuity: Continuity) -> Fresh:
    """Round 1's contribution."""
    model = nn.Linear(5, 3)
    strategy = Sync(manifest_for(SMALL))
    weights = IslandWeights(model, models.layout_of(model), strategy=strategy, download=Bf16())
    header = Told(
        kind="contribution",
        run_id="run",
        manifest_sha256="a" * 64,
        round=1,
        worker_id=NAME,
        incarnation=1,
        base_digest="b" * 64,
        weight=1,
        rows=1,
        tokens=8,
        loss_sum=1.0,
        ranges=ranges((0, 1)),
    ).header(weights.layout, Bf16())
    return Fresh(
        header,
        weights.stage(header.fragment, copies=False),
        continuity.capture(copies=False, course={}),
        Bf16(),
        Noise(seed=1, round=1, lane=NAME),
    )


def handed_in(continuity: Continuity, answers: Refusing | Exception | None) -> bool:
    """Whether round 1's contribution is in."""
    island = Driven(answers if isinstance(answers, Refusing) else Refusing(answers), worker_id=NAME)
    made = made_by(continuity)
    return island.driver.run(hand_in.contribute(island.session, continuity, made))


class Waiting(Refusing):
    """A link that commits an upload, once, when the island's own copy is safe."""

    def __init__(self) -> None:
        super().__init__(None)
        self.uploads = 0
        self.sent = b""

    def upload(self, _: Any, frame: FrameSource, **options: Any) -> str:
        self.sent = frame.read(0, frame.nbytes)
        self.uploads += 1
        assert self.uploads == 1, "what the island's own disk refuses is no reason to send again"
        options["before_commit"]()
        return "receipt"


@pytest.mark.parametrize(
    ("call", "number", "kind"),
    [("fsync", errno.EIO, DiskFailed), ("rename", errno.ENOSPC, StorageFull)],
)
def test_island_whose_own_disk_refuses_ends_and_sends_nothing_again(
    continuity: SlowToSave, monkeypatch: pytest.MonkeyPatch, call, number, kind
) -> None:
    """The same errors of the coordinator's disk are repeated without end."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(f"atoll.files.os.{call}", refuse)

    with pytest.raises(kind, match="start this island again"):
        handed_in(continuity, Waiting())


def test_frame_that_is_refused_for_what_it_holds_is_discarded_after_it_was_saved(
    continuity: SlowToSave, store: IslandStore
) -> None:
    with pytest.raises(FrameError, match="bad"):
        handed_in(continuity, FrameError("bad"))

    assert continuity.events == ["saved", "discarded"]
    assert store.rounds() == (None, ())


def test_frame_whose_round_is_over_is_discarded_after_it_was_saved(
    continuity: SlowToSave, store: IslandStore
) -> None:
    is_in = handed_in(continuity, StaleContribution("closed"))

    assert not is_in
    assert continuity.events == ["saved", "discarded"]
    assert store.rounds() == (None, ())


def test_accepted_frame_becomes_the_checkpoint_after_it_was_saved(
    continuity: SlowToSave, store: IslandStore
) -> None:
    is_in = handed_in(continuity, None)

    assert is_in
    assert continuity.events == ["saved", "promoted"]
    assert store.rounds() == (1, ())
    assert store.checkpoint() is not None


def test_frame_that_an_earlier_life_saved_is_sent_as_it_is(
    continuity: SlowToSave, store: IslandStore
) -> None:
    with pytest.raises(Killed):
        handed_in(continuity, Killed())
    kept, body = store.pending(1), (store.directory / "pending-1" / "frame").read_bytes()
    before, link = bytes.fromhex(kept.meta["preamble"]) + body, Waiting()
    island = Driven(link, worker_id=NAME)

    is_in = island.driver.run(hand_in.contribute(island.session, continuity, kept))

    assert is_in
    assert link.sent == before
    assert hashlib.sha256(link.sent).hexdigest() == kept.meta["sha256"]
    assert store.rounds() == (1, ())


@pytest.mark.parametrize(("codec", "carried"), [("int8", 1), ("fp32", 0)])
def test_residual_is_called_carried_as_long_as_manifests_keep_it(
    store: IslandStore, codec: str, carried: int
) -> None:
    """A lossless codec drops it; the island is told another manifest and then the first again."""
    first, other = (info_of(manifest_for(SMALL, {"upload.codec": c})) for c in ("bf16", codec))
    continuity = Continuity(store, first, worker_id=NAME, elements=18)
    continuity.start(None)
    with continuity.feedback(continuity.begin(1), 1) as feed:
        assert feed is not None and feed.carried == 0
        feed.after.fill_(0.5)

    continuity.adopt(other)
    continuity.adopt(first)

    with continuity.feedback(continuity.begin(2), 2) as feed:
        assert feed is not None
        assert (feed.carried, float(feed.before.sum())) == (carried, 18 * 0.5 * carried)


def test_copy_keeps_what_it_was_until_it_is_saved_and_then_gives_its_memory(store: IslandStore):
    """Two are handed in before the first is saved; the third is copied over the saved one."""
    continuity = Continuity(store, info(), worker_id=NAME, elements=18)
    continuity.start(None)
    local = torch.full((18,), 1.0)
    first = continuity.capture(copies=True, course={}, local=local)
    second = continuity.capture(copies=True, course={}, local=local.fill_(2.0))
    kept = [made.tensors[LOCAL_WEIGHTS] for made in (first, second)]
    assert [made.tolist() for made in kept] == [[1.0] * 18, [2.0] * 18]

    continuity.save(continuity.begin(1), {"run_id": "run"}, first)
    third = continuity.capture(copies=True, course={}, local=local.fill_(3.0))

    assert third.tensors[LOCAL_WEIGHTS].data_ptr() == kept[0].data_ptr()
    assert store.pending(1).tensors[LOCAL_WEIGHTS].tolist() == [1.0] * 18
    assert kept[1].tolist() == [2.0] * 18
