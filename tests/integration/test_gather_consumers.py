"""Overlap, clip and update of a window: the same bits however it is cut, those of a reference."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from atoll.codecs.topk.codec import TopK
from atoll.errors import ConfigError, Diverged, GroupBroken, StoreError
from atoll.gather.consume import Settings
from atoll.optim.nesterov import Nesterov
from atoll.optim.sgd import Sgd
from atoll.sums import digest
from tests import gather_reference as naive
from tests import gathers
from tests.gathers import LAYOUT, TILE_BYTES, Setting, bits

COPIES = Settings(overlap_skip=True)


@pytest.fixture(scope="module")
def seven():
    """Seven peers, one of whom sends nothing but zeros, and what the reference makes of them."""
    given = gathers.peers(6, zero=naive.Peer(gathers.zeros(), 2, None))
    return given, *gathers.expected(given, gathers.start())


# --- the same bits ---


@pytest.mark.parametrize(
    "made",
    [
        Setting(ranks=1, tile_bytes=4 * TILE_BYTES),
        Setting(ranks=2, turned=1, merged=True),
        Setting(ranks=3, tile_bytes=2 * TILE_BYTES, turned=1),
        Setting(ranks=4, tiles_per_exchange=2),
        Setting(ranks=5, turned=3),
        Setting(ranks=5, turned=2, merged=True),
    ],
    ids=lambda made: f"{made.ranks} ranks, {made.tile_bytes}, merged={made.merged}",
)
def test_window_equals_the_reference_however_it_is_cut(seven, made):
    given, wanted, weights = seven
    master = gathers.start()

    found = gathers.window(given, made, master)

    assert bits(master) == bits(weights)
    assert {done.digest for done in found} == {digest.digest(LAYOUT, weights)}
    for done in found:
        assert list(done.uids) == wanted.uids
        assert bits(done.factors) == bits(np.array([wanted.factors[u] for u in wanted.uids]))


def test_reversed_order_of_uids_gives_other_bits(seven):
    """The control: the sums do depend on the order, so the tests above can fail."""
    given, _, weights = seven
    names = dict(zip(sorted(given), sorted(given, reverse=True), strict=True))
    master = gathers.start()

    gathers.window({names[uid]: peer for uid, peer in given.items()}, Setting(ranks=2), master)

    assert bits(master) != bits(weights)
    assert torch.allclose(master, weights, atol=1e-6)


def test_sums_per_rank_would_give_other_bits(seven):
    """The control of why one owner adds all: two ranks' own sums, added, are not the same."""
    given, wanted, _ = seven
    size, parts = LAYOUT.size, [sorted(given)[::2], sorted(given)[1::2]]
    sent = {uid: naive.sent(peer.payload, size) for uid, peer in given.items()}

    def total(uids: list[str], where: int) -> np.float32:
        found = np.float32(0.0)
        for uid in uids:
            if where in sent[uid]:
                tensor = next(k for k, t in enumerate(LAYOUT.tensors) if where < t.span.stop)
                value = np.float32(sent[uid][where][1]) * wanted.factors[uid][tensor]
                found = found + value * np.float32(given[uid].weight)
        return found

    places = sorted({where for one in sent.values() for where in one})
    whole = [total(sorted(given), where) for where in places]
    joined = [total(parts[0], where) + total(parts[1], where) for where in places]

    assert bits(whole) != bits(joined)


# --- what counts ---


def test_sent_zero_counts_as_a_sender():
    """Two peers send the first places of each chunk, one of them zeros: the mean is half."""
    flat = torch.zeros(LAYOUT.size)
    flat[:64] = 1.0
    ones = TopK().encode(flat, noise=None, first_group=0).numpy().tobytes()
    given = {"a": naive.Peer(ones), "b": naive.Peer(gathers.zeros()), "c": naive.Peer(ones)}
    master = torch.zeros(LAYOUT.size)

    gathers.window(given, Setting(optimizer=Sgd(1.0)), master)

    assert master[:64].unique().tolist() == [pytest.approx(-2 / 3, abs=1e-7)]
    assert bits(master) == bits(
        np.array(
            naive.window(given, gathers.SIZES, [np.float32(0)] * LAYOUT.size, lr=1.0).weights,
            np.float32,
        )
    )


def test_weights_are_by_uid(seven):
    given, _, weights = seven
    even = {uid: replace(peer, weight=1) for uid, peer in given.items()}
    master = gathers.start()
    _, wanted = gathers.expected(even, gathers.start())

    gathers.window(even, Setting(ranks=2), master)

    assert bits(master) == bits(wanted)
    assert bits(master) != bits(weights)


def test_nobody_accepted_changes_nothing_not_even_by_momentum():
    master = gathers.start()

    found = gathers.window({}, Setting(ranks=3, optimizer=Nesterov(0.7, 0.9)), master)

    assert bits(master) == bits(gathers.start())
    assert [done.uids for done in found] == [()] * 3
    assert {done.digest for done in found} == {digest.digest(LAYOUT, master)}


def test_weight_below_one_is_refused_on_all_ranks_before_anything_changes(seven):
    given, *_ = seven
    master = gathers.start()

    with pytest.raises(ConfigError, match=r"rank 0: weight=0 .* rank 1: weight=0"):
        gathers.window(given | {"zero": naive.Peer(gathers.zeros(), 0)}, Setting(ranks=2), master)

    assert bits(master) == bits(gathers.start())


# --- copies ---


def test_copies_are_left_out_before_the_medians_where_the_run_says_so():
    given = gathers.peers(4)
    given["copy"] = replace(given["5"], stamp=99.0)  # of the second peer, and later
    wanted, weights = gathers.expected(given, gathers.start(), skip_copies_from=0.4)
    master, kept = gathers.start(), gathers.start()

    found = gathers.window(given, Setting(ranks=3, settings=COPIES), master)
    gathers.window(given, Setting(ranks=3), kept)

    assert wanted.copies == ["copy"]
    assert bits(master) == bits(weights) != bits(kept)
    for done in found:
        assert list(done.uids) == wanted.uids
        assert dict(done.findings.uids_over_thresh) == {"copy": "mega"}
        assert done.copies["copy"] == (
            "'copy' sent 100.0% of the places of '5', 100.0% of them with equal codes, and later"
        )


def test_copies_stay_where_the_run_does_not_say_so_and_are_found():
    given = gathers.peers(3)
    given["copy"] = replace(given["5"], stamp=99.0)
    _, weights = gathers.expected(given, gathers.start())
    master = gathers.start()

    [done] = gathers.window(given, Setting(), master)

    assert bits(master) == bits(weights)
    assert done.copies == {} and "copy" in done.uids
    assert dict(done.findings.uids_over_thresh) == {"copy": "mega"}


# --- all or nothing ---


class Broken(gathers.Stored):
    """Reads once, then finds its file cut, as a spool would."""

    reads = 0

    def read(self, uid: str, start: int, stop: int) -> bytes:
        type(self).reads += 1
        found = super().read(uid, start, stop)
        return found if type(self).reads < 3 else found[:-1]


class Lost(gathers.Stored):
    """A disk that gives nothing any more."""

    def read(self, uid: str, start: int, stop: int) -> bytes:
        raise OSError(5, "Input/output error")


class Twisted(gathers.Stored):
    """Serves one bit that is not what was validated, late in the payload."""

    def read(self, uid: str, start: int, stop: int) -> bytes:
        found = bytearray(super().read(uid, start, stop))
        if start:
            found[10] ^= 255
        return bytes(found)


@pytest.mark.parametrize("settings", [Settings(), COPIES], ids=["copies stay", "copies go"])
@pytest.mark.parametrize(
    ("kind", "error", "told"),
    [
        (Broken, StoreError, "rank 1: the payload of .*; its spool file was cut"),
        (Lost, GroupBroken, "rank 1: .*Input/output error"),
    ],
    ids=["cut", "lost"],
)
def test_spool_that_fails_on_one_rank_stops_all_with_its_sentence(
    seven, settings, kind, error, told
):
    given, *_ = seven
    Broken.reads = 0
    master = gathers.start()

    def source(rank, payloads):
        return kind(payloads) if rank == 1 else gathers.Stored(payloads)

    made = Setting(ranks=3, settings=settings, source=source)
    errors = gathers.errors_of(given, made, master)

    assert bits(master) == bits(gathers.start())
    assert [type(one) for one in errors] == [error] * 3
    assert len({str(one) for one in errors}) == 1
    assert re.fullmatch(told, str(errors[0]))


class Hollow(gathers.Stored):
    """A file that was cut and grew again: zeros where a tile was."""

    def read(self, uid: str, start: int, stop: int) -> bytes:
        found = super().read(uid, start, stop)
        return bytes(len(found)) if start else found


@pytest.mark.parametrize("settings", [Settings(), COPIES], ids=["copies stay", "copies go"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_payload_that_reads_as_zeros_stops_all_ranks(seven, settings, ranks):
    """Nobody has met an error, so nobody told: an owner alone sees that its tiles did not come."""
    given, *_ = seven
    master = gathers.start()

    def source(rank, payloads):
        return Hollow(payloads) if rank == ranks // 2 else gathers.Stored(payloads)

    made = Setting(ranks=ranks, settings=settings, source=source)
    errors = gathers.errors_of(given, made, master)

    assert [type(one) for one in errors] == [StoreError] * ranks
    assert len({str(one) for one in errors}) == 1 and "check the disk" in str(errors[0])
    assert bits(master) == bits(gathers.start())


def test_changed_bytes_between_ranks_change_no_weight(seven):
    given, *_ = seven
    master = gathers.start()

    def source(rank, payloads):
        return Twisted(payloads) if rank == 0 else gathers.Stored(payloads)

    errors = gathers.errors_of(given, Setting(ranks=2, source=source), master)

    assert len({str(one) for one in errors}) == 1
    assert "it must be as the codec writes it" in str(errors[0])
    assert bits(master) == bits(gathers.start())


@pytest.mark.parametrize("settings", [Settings(), COPIES], ids=["copies stay", "copies go"])
@pytest.mark.parametrize("place", [0, 100_000, LAYOUT.size - 1])
def test_one_tile_that_is_not_finite_leaves_all_ranks_as_they_are(seven, settings, place):
    given, *_ = seven
    start = gathers.start()
    start[place] = torch.inf
    master = start.clone()

    errors = gathers.errors_of(given, Setting(ranks=3, settings=settings), master)

    assert [type(one) for one in errors] == [Diverged] * 3
    assert len({str(one) for one in errors}) == 1
    assert f"element {place} of the layout, in tensor {LAYOUT.name_at(place)!r}" in str(errors[0])
    assert bits(master) == bits(start)


def test_step_that_overflows_is_voted_down_though_its_mean_is_finite():
    flat = torch.zeros(LAYOUT.size)
    flat[-1] = -(2.0**123)
    sent = TopK().encode(flat, noise=None, first_group=0).numpy().tobytes()
    given = {"a": naive.Peer(sent)}
    master = torch.zeros(LAYOUT.size)

    errors = gathers.errors_of(given, Setting(ranks=2, optimizer=Sgd(100.0)), master)

    assert [type(one) for one in errors] == [Diverged] * 2
    assert not master.any()
