"""Medians, factors, findings and quality of a window."""

import math

import numpy as np
import pytest

from atoll.errors import ConfigError
from atoll.gather import clip
from atoll.gather.findings import Findings, Thresholds, findings
from atoll.gather.partial import Accepted, Partial, Skipped
from atoll.gather.quality import quality
from atoll.gather.words import Reason

KEPT = 1_000


def found(shares, stamps, *, equal=None):
    """Findings of peers a, b, c, ... by the shares of places of their pairs."""
    uids = sorted(stamps)
    table = np.zeros((len(uids), len(uids)), np.int64)
    for (a, b), count in shares.items():
        table[uids.index(a), uids.index(b)] = count
    same = table if equal is None else table * equal // 100
    return findings(table, same, kept=KEPT, uids=uids, stamps=stamps, thresholds=Thresholds())


# --- clip ---


@pytest.mark.parametrize(
    ("norms", "median"),
    [([3.0], 3.0), ([5.0, 0.0], 0.0), ([4.0, 1.0, 2.0], 2.0), ([4.0, 1.0, 3.0, 2.0], 2.0)],
)
def test_median_is_the_lower_one(norms, median):
    assert clip.medians([[norm * norm] for norm in norms]).tolist() == [median]


def test_medians_are_by_parameter():
    assert clip.medians([[1.0, 100.0], [4.0, 25.0], [9.0, 1.0]]).tolist() == [2.0, 5.0]


def test_factor_is_rounded_once_from_fp64():
    squares = [[2.0, 7.0], [3.0, 7.0], [11.0, 0.0]]

    factors = clip.factors(squares)

    for row, own in enumerate(squares):
        for column, median in enumerate([math.sqrt(3.0), math.sqrt(7.0)]):
            wanted = min(1.0, median / (math.sqrt(own[column]) + 1e-8))
            assert factors[row, column] == np.float32(wanted)
    assert factors.dtype == np.float32


def test_peer_of_zeros_beside_one_other_lets_nothing_through():
    """The lower median of two, as it is defined; three peers are advised."""
    assert clip.factors([[0.0], [25.0]]).tolist() == [[0.0], [0.0]]


def test_nobody_has_no_factors():
    assert clip.factors([]).shape == (0, 0)
    assert clip.medians([]).shape == (0,)


def test_norms_of_other_layouts_are_refused():
    with pytest.raises(ConfigError, match=r"norms of \[1, 2\] parameters"):
        clip.factors([[1.0], [1.0, 2.0]])


# --- findings ---


@pytest.mark.parametrize("stamps", [{}, {"a": 1.0}])
def test_fewer_than_two_peers_are_zeros(stamps):
    assert found({}, stamps) == Findings()


def test_fields_are_of_all_pairs():
    got = found({("a", "b"): 500, ("a", "c"): 100, ("b", "c"): 300}, {"a": 1.0, "b": 2.0, "c": 3.0})

    assert (got.pairs_checked, got.pairs_high_ovlap, got.ratio_high_ovlap) == (3, 1, 1 / 3)
    assert (got.min_overlap, got.mean_overlap, got.max_overlap) == (0.1, 0.3, 0.5)
    assert [pair.uids for pair in got.pairs_over_thresh] == [("a", "b")]


def test_least_overlap_is_not_zero_when_all_pairs_share_everything():
    got = found({("a", "b"): KEPT}, {"a": 1.0, "b": 2.0})

    assert (got.min_overlap, got.mean_overlap, got.max_overlap) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("stamps", "blamed"),
    [
        ((1.0, 2.0), "b"),
        ((2.0, 1.0), "a"),
        ((1.0, 1.0), None),
        ((None, 1.0), None),
        ((1.0, None), None),
        ((None, None), None),
        ((0.0, 1.0), "b"),
    ],
)
def test_later_object_is_blamed_and_nobody_where_it_is_unknown(stamps, blamed):
    got = found({("a", "b"): 450}, dict(zip("ab", stamps, strict=True)))

    assert got.pairs_over_thresh[0].blamed == blamed
    assert dict(got.uids_over_thresh) == ({blamed: "high"} if blamed else {})


@pytest.mark.parametrize(
    ("count", "level"), [(399, None), (400, "high"), (499, "high"), (500, "max"), (600, "mega")]
)
def test_level_is_by_the_share_of_places(count, level):
    got = found({("a", "b"): count}, {"a": 1.0, "b": 2.0})

    assert got.uids_over_thresh.get("b") == level


@pytest.mark.parametrize("first", [KEPT, 400])
def test_highest_level_of_a_peer_stands_in_any_order_of_pairs(first):
    shares = {("a", "c"): first, ("b", "c"): KEPT + 400 - first}

    got = found(shares, {"a": 1.0, "b": 2.0, "c": 3.0})

    assert dict(got.uids_over_thresh) == {"c": "mega"}


def test_share_of_equal_codes_is_of_the_shared_places():
    got = found({("a", "b"): 800}, {"a": 1.0, "b": 2.0}, equal=25)

    assert got.pairs_over_thresh[0].equal_codes == got.mean_equal_codes == 0.25


def test_thresholds_must_ascend():
    with pytest.raises(ConfigError, match="must ascend between 0 and 1"):
        Thresholds(high=0.6, max=0.5)


# --- quality ---


def taken(uid: str) -> Accepted:
    return Accepted(uid, uid * 64, 1, (1.0,), None, 0, 0)


def skip(uid: str, reason: Reason) -> Skipped:
    return Skipped(uid, reason, "")


def test_quality_compares_whom_it_meant_with_whom_it_took():
    got = quality(
        [
            Partial(1, (taken("b"), taken("z")), (skip("d", Reason.SERVER_AWAY),)),
            Partial(0, (taken("a"), taken("x")), (skip("c", Reason.LATE), skip("y", Reason.LATE))),
        ],
        primaries=["a", "b", "c", "d"],
        reserves=["x", "y", "z"],
        copies=["z"],
        scores={"a": 1.0, "c": 3.0, "x": 2.0},
    )

    assert (got.intended, got.actual, got.reserves_used, got.skipped) == (4, 3, 1, 4)
    assert (got.intended_mean_score, got.actual_mean_score) == (2.0, 1.5)
    assert got.success_rate == 0.75
    assert got.skips == {"COPY": 1, "LATE": 2, "SERVER_AWAY": 1}
    assert got.skips_by_fault == {"peer": 3, "ours": 1}


def test_quality_without_scores_or_peers_has_none():
    got = quality([], primaries=[], reserves=[])

    assert (got.intended_mean_score, got.actual_mean_score, got.success_rate) == (None, None, 0.0)


def test_primary_that_is_listed_as_a_reserve_too_is_no_reserve_used():
    got = quality([Partial(0, (taken("a"), taken("x")))], primaries=["a"], reserves=["a", "x"])

    assert got.reserves_used == 1
