"""An island's downloads: what it checks before it applies anything, and when it gives up."""

import itertools

import pytest
import torch
from torch import nn

from atoll.clock import ManualClock
from atoll.codecs.bf16.codec import Bf16
from atoll.codecs.fp32.codec import Fp32
from atoll.errors import AtollError, FrameError, LayoutMismatch, ManifestMismatch
from atoll.island.conversation import backoff, fetch
from atoll.island.link.base import Download
from atoll.island.state.weights import IslandWeights
from atoll.layout import Layout
from atoll.protocol.messages import Info, InfoRequest
from atoll.strategies.diloco.sync import Sync
from atoll.sums import digest as digests
from atoll.wire.frame import FrameWriter
from atoll.wire.header import Told
from tests import clusters, links
from tests.clusters import info_of, manifest_for
from tests.frames import ranges
from tests.links import Driven

LAYOUT = Layout.of([("weight", (3, 5), "float32"), ("bias", (3,), "float32")])
VALUES = torch.arange(LAYOUT.size, dtype=torch.float32) + 1
DIGEST = digests.digest(LAYOUT, VALUES).root
WRONG = "f" * 64


def island(model: nn.Module | None = None) -> IslandWeights:
    """An island whose published copy is all zeros, without a version."""
    return IslandWeights(
        model or nn.Linear(5, 3), LAYOUT, strategy=Sync(manifest_for(LAYOUT)), download=Bf16()
    )


def published(weights: IslandWeights, model: nn.Module) -> torch.Tensor:
    """The island's published copy, which a new round starts with."""
    weights.train()
    weights.reset()
    return clusters.flat_of(model)


def whole(*, layout: Layout = LAYOUT, result_digest: str | None = DIGEST, **changes) -> bytes:
    """A frame of VALUES; `changes` go to its header."""
    codec = changes.pop("codec", Fp32())
    fields = {"kind": "weights", "run_id": "run", "manifest_sha256": "a" * 64, "round": 1}
    told = Told(**{**fields, "result_digest": result_digest, **changes})
    head = told.header(layout, codec)
    made = bytearray()
    writer = FrameWriter(head, made.extend)
    writer.payload(bytes(codec.encode(VALUES, noise=None, first_group=0).numpy()))
    writer.finish()
    return bytes(made)


class Offers(links.Answering):
    """A link whose downloads are given frames, each under its tag; the last one forever."""

    def __init__(self, *frames: tuple[str, bytes]) -> None:
        self._frames = frames
        self.clock = ManualClock()
        self.tried: list[float] = []  # when

    @property
    def downloads(self) -> int:
        return len(self.tried)

    @property
    def pauses(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.tried)]

    def info(self, _: InfoRequest) -> Info:
        return info_of(manifest_for(LAYOUT)).model_copy(update={"run_id": "run"})

    def download(self, wanted: Download) -> None:
        tag, data = self._frames[min(self.downloads, len(self._frames) - 1)]
        self.tried.append(self.clock.now())
        assert self.downloads < 100, "the island never gives up"
        wanted.progress.opened(tag, 0)
        wanted.sink(data)
        wanted.progress.offset += len(data)


def fetched(link: Offers, weights: IslandWeights) -> None:
    """Goes the steps of a download to their end."""
    island = Driven(link, clock=link.clock, seed=1)
    island.driver.run(fetch.receive(island.session, weights))


def test_whole_frame_becomes_the_published_weights():
    model = nn.Linear(5, 3)
    weights = island(model)

    fetched(Offers(("one", whole())), weights)

    assert (weights.version, weights.digest) == (1, DIGEST)
    assert torch.equal(published(weights, model), VALUES)


def test_bad_frame_is_followed_by_another_try():
    weights, link = island(), Offers(("one", whole(result_digest=WRONG)), ("one", whole()))

    fetched(link, weights)

    assert (link.downloads, weights.digest) == (2, DIGEST)


def test_frame_that_stays_bad_is_given_up():
    weights, link = island(), Offers(("one", whole(result_digest=WRONG)))

    with pytest.raises(FrameError, match=f"published is {WRONG}"):
        fetched(link, weights)

    assert link.downloads == fetch.MAX_TRIES
    assert weights.digest is None


def test_coordinator_that_goes_on_to_other_frames_is_not_given_up():
    bad = [(f"version {n}", whole(result_digest=WRONG)) for n in range(10)]
    weights, link = island(), Offers(*bad, ("good", whole()))

    fetched(link, weights)

    assert (link.downloads, weights.digest) == (11, DIGEST)


def within(pauses: list[float], longest: list[float]) -> bool:
    """Whether each pause is between half of its longest and that."""
    return all(
        0.5 * most <= pause <= most * (1 + 1e-9)
        for pause, most in zip(pauses, longest, strict=True)
    )


def test_tries_of_a_bad_frame_are_ever_further_apart():
    link = Offers(("one", whole(result_digest=WRONG)))

    with pytest.raises(FrameError):
        fetched(link, island())

    assert within(link.pauses, [backoff.FIRST_SECONDS, 2 * backoff.FIRST_SECONDS])


def test_pause_is_short_again_when_the_coordinator_goes_on_to_another_frame():
    bad = [(f"version {n // 2}", whole(result_digest=WRONG)) for n in range(4)]
    link = Offers(*bad, ("good", whole()))

    fetched(link, island())

    assert within(link.pauses, [backoff.FIRST_SECONDS, 2 * backoff.FIRST_SECONDS] * 2)


def test_good_frame_is_fetched_without_a_pause():
    link = Offers(("one", whole()))

    fetched(link, island())

    assert link.clock.now() == 0.0


OTHER_LAYOUT = Layout.of([("weight", (5, 3), "float32"), ("bias", (3,), "float32")])
UNFIT: dict[str, tuple[bytes, type[AtollError]]] = {
    "run": (whole(run_id="another"), ManifestMismatch),
    "layout": (whole(layout=OTHER_LAYOUT), LayoutMismatch),
    "codec": (whole(codec=Bf16()), FrameError),
    "kind": (
        whole(
            kind="contribution",
            result_digest=None,
            base_digest=DIGEST,
            worker_id="a",
            incarnation=1,
            ranges=ranges((0, 1)),
            codec=Bf16(),
        ),
        FrameError,
    ),
    "update applies to": (whole(kind="update", base_digest=WRONG, codec=Bf16()), FrameError),
}


@pytest.mark.parametrize("what", UNFIT)
def test_frame_of_another_kind_run_or_layout_is_refused_before_anything_is_applied(what):
    model = nn.Linear(5, 3)
    weights = island(model)
    fetched(Offers(("one", whole())), weights)
    data, error = UNFIT[what]
    receiver = weights.receive(run_id="run")

    with pytest.raises(error, match=what):
        receiver.feed(data)

    assert weights.digest == DIGEST
    assert torch.equal(published(weights, model), VALUES)
