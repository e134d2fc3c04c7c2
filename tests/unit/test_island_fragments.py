"""An island's weights in two fragments: each is fetched, merged and handed in on its own."""

import hashlib
import io
import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from atoll.codecs.base import Codec
from atoll.codecs.bf16.codec import Bf16
from atoll.codecs.fp32.codec import Fp32
from atoll.codecs.noise import Noise
from atoll.errors import FrameError
from atoll.island.state import encoding
from atoll.island.state.encoding import Feedback
from atoll.island.state.weights import IslandWeights
from atoll.layout import TILE_BYTES, Layout, byte_view
from atoll.strategies.base import ALL, Fragments
from atoll.sums import digest as digests
from atoll.wire import frame
from atoll.wire.frame import FrameWriter
from atoll.wire.header import Told
from tests.clusters import flat_of, manifest_for, module_of
from tests.frames import ranges
from tests.outside.relay import Relay

LAYOUT = Layout.of([("first", (40,), "float32"), ("second", (24,), "float32")])
RELAY = Relay(manifest_for(LAYOUT))
PARTS = Fragments.of(RELAY, LAYOUT)
OLD = torch.arange(LAYOUT.size, dtype=torch.float32)
NEW = OLD * 2 + 1


@dataclass(frozen=True)
class Mixing(Relay):
    """A relay whose islands keep a quarter of their own in a merge."""

    local_weight = 0.25


def framed(layout: Layout, codec: Codec, payload: Tensor, **said: object) -> bytes:
    told = Told(run_id="run", manifest_sha256="a" * 64, **said)  # type: ignore[arg-type] # fields of any type
    header = told.header(layout, codec)
    made = bytearray()
    writer = FrameWriter(header, made.extend)
    writer.payload(byte_view(payload))
    writer.finish()
    return bytes(made)


def whole(version: int) -> bytes:
    """OLD as the weights of a version."""
    root = digests.digest(LAYOUT, OLD).root
    payload = OLD.view(torch.uint8)
    return framed(LAYOUT, Fp32(), payload, kind="weights", round=version, result_digest=root)


def part(version: int, *, kind: str = "weights", base: str | None = None) -> bytes:
    """The fragment of a round: NEW in the place of OLD."""
    fragment = PARTS[RELAY.fragment(version, is_last=False)]
    values, codec = fragment.of(NEW), Fp32() if kind == "weights" else Bf16()
    payload = values.view(torch.uint8)
    if kind == "update":
        difference = values - fragment.of(OLD)
        payload = codec.encode(difference, noise=None, first_group=0)
        values = fragment.of(OLD) + codec.decode(payload, len(fragment.span))
    return framed(
        fragment.layout,
        codec,
        payload,
        kind=kind,
        round=version,
        fragment=RELAY.fragment(version, is_last=False),
        base_digest=base,
        result_digest=digests.digest(fragment.layout, values).root,
    )


class Island:
    """Weights, and the model that they are of."""

    def __init__(self, strategy: Relay = RELAY) -> None:
        self.model = module_of(LAYOUT)
        self.weights = IslandWeights(self.model, LAYOUT, strategy=strategy, download=Bf16())

    def take(self, data: bytes) -> None:
        receiver = self.weights.receive()
        receiver.feed(data)
        receiver.finish()

    def begin(self) -> "Island":
        """Holds version 0 and trains from it."""
        self.take(whole(0))
        self.weights.reset()
        return self

    def train(self) -> Tensor:
        """Moves every weight; the local weights after it."""
        self.weights.train()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(-1.5)
        return self.local

    @property
    def local(self) -> Tensor:
        return flat_of(self.model)

    @property
    def published(self) -> Tensor:
        with self.weights.published_shown():
            return self.local


@pytest.fixture
def island() -> Island:
    """Holds version 0 and trains from it."""
    return Island().begin()


def digest_of(number: int, flat: Tensor) -> str:
    return digests.digest(PARTS[number].layout, PARTS[number].of(flat)).root


def test_whole_download_gives_every_fragment_with_its_digest(island):
    assert torch.equal(island.local, OLD)
    assert island.weights.version == 0
    assert [island.weights.base_digest(n) for n in (0, 1, ALL)] == [
        *(digest_of(n, OLD) for n in (0, 1)),
        digests.digest(LAYOUT, OLD).root,
    ]


def test_island_without_weights_has_no_base():
    assert [Island().weights.base_digest(n) for n in (0, 1, ALL)] == ["", "", ""]


def test_what_arrives_changes_the_published_copy_alone(island):
    trained = island.train()

    island.take(part(1))

    assert torch.equal(island.local, trained)
    assert torch.equal(island.published, torch.cat([PARTS[0].of(NEW), PARTS[1].of(OLD)]))
    assert (island.weights.version, island.weights.merged) == (1, 0)


def test_fragments_are_merged_in_order(island):
    island.take(part(1))
    island.weights.merge(1)
    half = torch.cat([PARTS[0].of(NEW), PARTS[1].of(OLD)])

    assert torch.equal(island.local, half)
    assert island.weights.digest == digests.digest(LAYOUT, half).root

    island.take(part(2))
    island.weights.merge(2)

    assert torch.equal(island.local, NEW)
    assert island.weights.held == (2, digests.digest(LAYOUT, NEW).root)
    assert island.weights.merged == 2


def test_merged_fragment_leaves_the_others_training_alone(island):
    trained = island.train()

    island.take(part(1))
    island.weights.merge(1)

    assert torch.equal(island.local, torch.cat([PARTS[0].of(NEW), PARTS[1].of(trained)]))
    assert island.weights.base_digest(1) == digest_of(1, OLD)


def test_merge_weighs_its_own_values_and_the_published_ones():
    island = Island(Mixing(manifest_for(LAYOUT))).begin()
    trained = island.train()

    island.take(part(1))
    island.weights.merge(1)

    mixed = PARTS[0].of(trained) * 0.25 + PARTS[0].of(NEW) * 0.75
    assert torch.equal(island.local, torch.cat([mixed, PARTS[1].of(trained)]))


def test_round_that_is_said_to_carry_the_whole_model_is_merged_whole(island):
    island.train()
    island.weights.told(1, ALL)

    island.take(whole(1))
    island.weights.merge(1)

    assert torch.equal(island.local, OLD)


def test_fragment_that_moved_twice_since_it_was_merged_can_not_be_merged(island):
    """What the earlier of the two rounds made of it is not here any more."""
    can = [island.weights.can_merge()]
    for version in (1, 2):
        island.take(part(version))
        can.append(island.weights.can_merge())
    island.weights.forget()
    island.take(whole(3))
    can.append(island.weights.can_merge())

    assert can == [True, True, True, False]


def test_whole_model_that_came_after_a_fragment_can_not_be_merged(island):
    island.weights.told(2, ALL)
    island.take(part(1))
    island.take(whole(2))

    assert not island.weights.can_merge()

    island.weights.merge(1)

    assert island.weights.can_merge()


def test_update_of_a_fragment_applies_to_that_fragment(island):
    island.take(part(1, kind="update", base=digest_of(0, OLD)))

    moved = Bf16().encode(PARTS[0].of(NEW - OLD), noise=None, first_group=0)
    right = PARTS[0].of(OLD) + Bf16().decode(moved, len(PARTS[0].span))
    assert torch.equal(island.published, torch.cat([right, PARTS[1].of(OLD)]))


def test_update_of_other_weights_is_refused(island):
    with pytest.raises(FrameError, match="the update applies to weights"):
        island.take(part(1, kind="update", base=digest_of(1, OLD)))

    assert torch.equal(island.published, OLD)
    assert island.weights.version == 0


@pytest.mark.parametrize("version", [2, 3])
def test_fragment_of_a_later_version_is_refused(island, version):
    with pytest.raises(FrameError, match=f"of version {version}, the island holds version 0"):
        island.take(part(version))

    assert torch.equal(island.published, OLD)
    assert island.weights.version == 0


def test_fragment_that_it_has_already_is_refused(island):
    island.take(part(1))

    with pytest.raises(FrameError, match="of version 1, the island holds version 1"):
        island.take(part(1))


def test_fragment_is_refused_after_the_weights_were_forgotten(island):
    island.weights.forget()

    with pytest.raises(FrameError, match="it fetches the weights whole"):
        island.take(part(2))


def test_reset_makes_all_local_weights_the_published_ones(island):
    island.train()
    island.take(part(1))

    island.weights.reset()

    assert torch.equal(island.local, torch.cat([PARTS[0].of(NEW), PARTS[1].of(OLD)]))
    assert island.weights.merged == 1


def test_local_weights_of_an_earlier_life_are_gone_on_from(island):
    saved = island.weights.local.clone() * 3
    island.take(part(1))

    island.weights.go_on_from(saved, merged=0)

    assert torch.equal(island.local, OLD * 3)
    assert (island.weights.version, island.weights.merged) == (1, 0)
    assert not island.weights.shows_published


def test_copy_of_the_local_weights_is_not_moved_by_training(island):
    copy = island.weights.local.clone()

    island.train()

    assert torch.equal(copy, OLD)


def test_model_shows_the_published_weights_until_it_is_trained_or_another_version_arrives(island):
    shown = [island.weights.shows_published]
    island.train()
    shown.append(island.weights.shows_published)
    island.weights.reset()
    shown.append(island.weights.shows_published)
    island.take(part(1))
    shown.append(island.weights.shows_published)
    island.weights.merge(1)
    shown.append(island.weights.shows_published)

    assert shown == [True, False, True, False, True]


def test_published_weights_are_shown_and_the_own_ones_come_back_bit_for_bit(island):
    trained = island.train()
    odd = torch.tensor([0x7FC00123, -0x80000000, 1], dtype=torch.int32)  # a NaN, -0.0, the least
    with torch.no_grad():
        next(island.model.parameters())[:3] = odd.view(torch.float32)
    before = island.local.view(torch.int32)

    with island.weights.published_shown():
        shown = island.local

    assert torch.equal(shown, OLD)
    assert torch.equal(island.local.view(torch.int32), before)
    assert not torch.equal(trained, OLD)


def test_own_weights_come_back_when_the_evaluation_fails(island):
    trained = island.train()

    with pytest.raises(ZeroDivisionError), island.weights.published_shown():
        raise ZeroDivisionError

    assert torch.equal(island.local, trained)


@pytest.mark.parametrize("number", [0, 1, ALL])
def test_staged_displacement_is_how_far_that_fragment_has_moved(island, number):
    trained, fragment = island.train(), PARTS[number]

    staged = island.weights.stage(number, copies=False)

    tiles = [staged.tile(span) for span in fragment.layout.tiles(TILE_BYTES)]
    assert torch.equal(torch.cat(tiles), fragment.of(OLD - trained))
    assert (staged.fragment, staged.size) == (fragment, LAYOUT.size)


def test_copy_that_is_staged_is_not_moved_by_what_follows(island):
    trained = island.train()

    staged = island.weights.stage(0, copies=True)
    island.train()
    island.take(part(1))

    [span] = PARTS[0].layout.tiles(TILE_BYTES)
    assert torch.equal(staged.tile(span), PARTS[0].of(OLD - trained))


@pytest.mark.parametrize("number", [0, 1])
def test_residual_of_the_fragment_that_is_not_handed_in_is_kept(island, number):
    trained = island.train()
    fragment, other = PARTS[number], PARTS[1 - number]
    before = (torch.linspace(-1, 1, LAYOUT.size) * 0.01).bfloat16()
    after, kept, sent = torch.zeros_like(before), bytearray(), io.BytesIO()
    header = Told(
        kind="contribution",
        run_id="run",
        manifest_sha256="a" * 64,
        round=number + 1,
        fragment=number,
        worker_id="a",
        incarnation=1,
        base_digest=island.weights.base_digest(number),
        weight=1,
        rows=1,
        tokens=4,
        loss_sum=1.0,
        ranges=ranges((0, 1)),
    ).header(fragment.layout, Bf16())

    encoded = encoding.encode(
        island.weights.stage(number, copies=False),
        header,
        sent,
        codec=Bf16(),
        feed=Feedback(before, after, kept.extend, 1.0, carried=7),
        noise=Noise(seed=1, round=1, lane="a"),
    )

    wanted = fragment.of(OLD - trained) + fragment.of(before).float()
    payload = Bf16().encode(wanted, noise=None, first_group=0)
    lost = wanted - Bf16().decode(payload, len(fragment.span))
    assert torch.equal(other.of(after), other.of(before))
    assert torch.equal(fragment.of(after), lost.bfloat16())
    assert bytes(kept) == bytes(byte_view(after))
    whole = encoded.preamble + sent.getvalue()
    assert sent.getvalue() == bytes(byte_view(payload)) + hashlib.sha256(whole[:-32]).digest()
    assert encoded.sha256 == hashlib.sha256(whole).hexdigest()
    # Of the whole model, also of what is not handed in.
    stated, _ = frame.parse_preamble(encoded.preamble)
    right = math.sqrt(math.fsum(value * value for value in after.tolist()))
    assert stated == replace(header, residual=stated.residual, carried=7)
    assert stated.residual == pytest.approx(right, rel=1e-12)
    assert stated.residual > 1.0001 * float(fragment.of(after).double().norm())  # the control
