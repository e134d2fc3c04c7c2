"""The compiled loops of a gather give the bits of their twins in numpy, and the reference's."""

import numpy as np
import pytest
import torch

from atoll.codecs.fp32.codec import Fp32
from atoll.compiled import base
from atoll.gather import supports
from atoll.gather.overlap import PairCounts
from atoll.gather.update import mean_tile
from atoll.layout import GROUP_ELEMENTS, Span
from atoll.optim.sgd import Sgd
from atoll.strategies.gather.step import ClippedMean
from atoll.strategies.outer import OuterState
from tests import gather_reference as naive
from tests import gathers
from tests.gather_runs import fetched
from tests.gathers import LAYOUT, bits

# A full tile over several tensors; one that begins inside a tensor; the last, with a short chunk.
SPANS = [
    Span(0, 2 * GROUP_ELEMENTS),
    Span(GROUP_ELEMENTS, 2 * GROUP_ELEMENTS),
    Span(4 * GROUP_ELEMENTS, LAYOUT.size),
    Span(0, LAYOUT.size),
]
every_span = pytest.mark.parametrize("span", SPANS, ids=str)


@pytest.fixture(autouse=True, scope="module")
def ready() -> None:
    base.compiled.prepare(base.LARGE_ELEMENTS)
    base.compiled.wait()


@pytest.fixture
def both(monkeypatch):
    """Runs a computation twice: with the loops, and in numpy."""

    def run(computation):
        assert base.compiled.ready_for_any()
        fast = computation()
        with monkeypatch.context() as patch:
            patch.setattr(base.compiled, "ready", lambda _: False)
            patch.setattr(base.compiled, "ready_for_any", lambda: False)
            return fast, computation()

    return run


def sent_of(span: Span) -> supports.Supports:
    first, stop = (supports.CODEC.encoded_bytes(edge) for edge in (span.start, span.stop))
    payloads = [peer.payload for _, peer in sorted(gathers.peers(6).items())]
    payloads = [*payloads, payloads[0], gathers.zeros()]  # a copy; nothing but zeros
    slices = [np.frombuffer(one[first:stop], np.uint8) for one in payloads]
    return supports.decode(np.stack(slices), span)


@every_span
def test_mean_has_the_same_bits(both, span):
    factors = np.random.default_rng(1).random((8, len(LAYOUT.tensors)), np.float32)
    weights = [1, 2, 3, 2**24 + 1, 5, 2**40 + 3, 7, 8]

    fast, plain = both(lambda: mean_tile(sent_of(span), factors, weights, LAYOUT))

    assert bits(fast[0]) == bits(plain[0])
    assert bits(fast[1]) == bits(plain[1])
    assert np.count_nonzero(fast[1]) > np.count_nonzero(fast[0]) > 0


@every_span
def test_pairs_are_counted_alike(both, span):
    def counted():
        made = PairCounts(8)
        made.add(sent_of(span))
        return made.table

    fast, plain = both(counted)

    assert torch.equal(fast, plain)
    assert fast[0, 0, 6] == fast[1, 0, 6] == supports.kept_by(len(span))


def test_counts_are_those_of_all_pairs_in_plain_python():
    given = gathers.peers(5, copy=gathers.peers(1)["4"], zero=naive.Peer(gathers.zeros()))
    values = {uid: naive.sent(peer.payload, LAYOUT.size) for uid, peer in given.items()}
    shared, equal = naive.compared(values)
    counts, uids = PairCounts(len(given)), sorted(given)

    for span in LAYOUT.tiles(gathers.TILE_BYTES):
        first, stop = (supports.CODEC.encoded_bytes(edge) for edge in (span.start, span.stop))
        slices = [np.frombuffer(given[uid].payload[first:stop], np.uint8) for uid in uids]
        counts.add(supports.decode(np.stack(slices), span))

    rows = [(a, b) for a in range(len(uids)) for b in range(a + 1, len(uids))]
    assert {(uids[a], uids[b]): counts.shared[a, b] for a, b in rows} == shared
    assert {(uids[a], uids[b]): counts.equal[a, b] for a, b in rows} == equal
    assert 0 < min(shared.values()) < max(shared.values()) and equal != shared


def test_window_of_two_ranks_has_the_reference_bits():
    given = gathers.peers(5)
    master = gathers.start()
    _, weights = gathers.expected(given, gathers.start())

    gathers.window(given, gathers.Setting(ranks=2), master)

    assert bits(master) == bits(weights)


def test_outer_step_of_a_run_has_the_same_bits(both):
    sources = fetched(gathers.peers(4))

    def step() -> tuple[bytes, bytes, list[int]]:
        master = gathers.start()
        made = ClippedMean(optimizer=Sgd(0.3), download=Fp32(), noise=None, step=1)
        ready = made.prepared(LAYOUT, sources, watched=True)
        ready.apply(OuterState(LAYOUT, master, {}, master), sources, None)
        assert ready.clipped is not None and ready.pairs is not None
        counts = ready.pairs.counts.table.flatten().tolist()
        return bits(master), bits(ready.clipped.factors), counts

    fast, plain = both(step)

    assert fast == plain
