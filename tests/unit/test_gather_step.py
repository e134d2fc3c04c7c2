"""The outer step of a gather run: the bits of a naive program and of a window of the library."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.codecs.fp32.codec import Fp32
from atoll.errors import ConfigError, EmptySum, FrameError
from atoll.gather import clip
from atoll.layout import ELEMENT_BYTES, GROUP_ELEMENTS, Span
from atoll.optim.sgd import Sgd
from atoll.strategies.gather.step import ClippedMean
from atoll.strategies.outer import OuterState
from tests import gather_reference as naive
from tests.gather_runs import fetched
from tests.gathers import LAYOUT, LR, Setting, bits, expected, peers, start, window, zeros

GROUP_BYTES = GROUP_ELEMENTS * ELEMENT_BYTES
STEP = ClippedMean(optimizer=Sgd(LR), download=Fp32(), noise=None, step=1)
GIVEN = peers(5, **{"90": naive.Peer(zeros(), 2)})  # two of six share every weight; one sends zeros


def applied(given: Mapping[str, naive.Peer], step: ClippedMean = STEP, *, threads: int = 1) -> Any:
    """Weights after a step, part by part, last part first; and the step that made them."""
    master, sources = start(), fetched(given)
    state = OuterState(LAYOUT, master, {}, master)
    ready = step.prepared(LAYOUT, sources, watched=True)
    for part in reversed(LAYOUT.parts(threads, step.tile_bytes)):
        ready.apply(state, sources, None, part=part)
    return master, ready


@pytest.fixture(scope="module")
def reference() -> tuple[naive.Window, Tensor]:
    return expected(GIVEN, start())


@pytest.mark.parametrize("tile_bytes", [GROUP_BYTES, 2 * GROUP_BYTES, 1 << 20])
@pytest.mark.parametrize("threads", [1, 3])
def test_step_has_the_bits_of_the_naive_program_at_any_tile_size(reference, tile_bytes, threads):
    _, wanted = reference

    found, _ = applied(GIVEN, replace(STEP, tile_bytes=tile_bytes), threads=threads)

    assert bits(found) == bits(wanted)


def test_step_has_the_bits_of_a_window_of_one_rank(reference):
    master = start()
    [done] = window(GIVEN, Setting(), master)

    found, step = applied(GIVEN)

    assert bits(found) == bits(master)
    assert bits(step.clipped.factors) == bits(done.factors)


def test_pairs_are_counted_once_whatever_the_tiles_and_threads(reference):
    naive_window, _ = reference
    uids = sorted(GIVEN)
    wanted = [
        [naive_window.shared.get((a, b), 0), naive_window.equal.get((a, b), 0)]
        for a in uids
        for b in uids
    ]

    for threads, tile_bytes in ((1, 1 << 20), (3, GROUP_BYTES)):
        _, step = applied(GIVEN, replace(STEP, tile_bytes=tile_bytes), threads=threads)
        assert step.pairs.counts.table.flatten(1).T.tolist() == wanted


def test_step_that_nobody_watches_counts_no_pairs():
    assert STEP.prepared(LAYOUT, fetched(GIVEN)).pairs is None


def test_what_nobody_sent_keeps_its_bits(reference):
    before, (found, _) = start(), applied(GIVEN)
    sent = set().union(*(naive.sent(peer.payload, LAYOUT.size) for peer in GIVEN.values()))
    untouched = torch.tensor([place not in sent for place in range(LAYOUT.size)])

    assert bits(found[untouched]) == bits(before[untouched])
    assert bits(found[~untouched]) != bits(before[~untouched])


@pytest.mark.parametrize("mutation", ["order", "factors", "weights"])
def test_other_order_factors_or_weights_give_other_bits(reference, mutation, monkeypatch):
    """Controls: the comparisons above see what they are for."""
    _, wanted = reference
    given: dict[str, naive.Peer] = dict(GIVEN)
    if mutation == "order":
        given = {f"{100 - int(uid):03}": peer for uid, peer in GIVEN.items()}
    if mutation == "factors":
        monkeypatch.setattr(clip, "EPSILON", 1.0)
    if mutation == "weights":
        given = {uid: replace(peer, weight=1) for uid, peer in GIVEN.items()}

    found, _ = applied(given)

    assert bits(found) != bits(wanted)


def test_nobody_accepted_is_no_step():
    with pytest.raises(EmptySum):
        STEP.prepared(LAYOUT, [])


def test_contribution_that_counts_nothing_is_refused():
    with pytest.raises(ConfigError, match="weight=0"):
        STEP.prepared(LAYOUT, fetched({"a": replace(GIVEN["4"], weight=0)}))


def test_payload_that_no_encoder_writes_is_refused_before_a_weight_moves():
    broken = bytearray(GIVEN["4"].payload)
    broken[-1] = 255  # no magnitude, in the last tile

    with pytest.raises(FrameError):
        STEP.prepared(LAYOUT, fetched({"a": naive.Peer(bytes(broken)), "b": GIVEN["5"]}))


def test_tile_of_a_contribution_is_its_dense_displacement():
    span = Span(GROUP_ELEMENTS, 2 * GROUP_ELEMENTS)
    [source] = fetched({"a": GIVEN["4"]})

    found = source.tile(span)

    sent = naive.sent(GIVEN["4"].payload, LAYOUT.size)
    wanted = [sent.get(place, (0, 0.0))[1] for place in range(span.start, span.stop)]
    assert found.tolist() == wanted
