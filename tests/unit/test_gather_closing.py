"""Primaries, reserves and the closing rule of gather runs: pure answers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.manifest import GatherSettings
from atoll.strategies import registry
from atoll.strategies.base import RoundView
from atoll.strategies.gather import closing
from atoll.strategies.gather.closing import Lists
from tests.gather_runs import manifest

NAMES = [*"abcdef", "10", "9", "Z", "_"]
sets = st.sets(st.sampled_from(NAMES))


@st.composite
def views(draw: st.DrawFn) -> RoundView:
    given_rows = draw(sets)
    ended = draw(sets) & given_rows
    planned = given_rows - ended
    return RoundView(
        round=1,
        planned=planned,
        accepted=draw(sets) & planned,
        live=draw(sets),
        ended=ended,
        announced=draw(sets) & planned,
        open_seconds=draw(st.sampled_from([0.0, 4.9, 5.0, 60.0])),
    )


settings = st.builds(
    GatherSettings,
    primaries=st.integers(0, 8),
    primary_seconds=st.sampled_from([0.0, 5.0]),
)


def view(
    planned: str, accepted: str = "", *, live: str | None = None, ended: str = ""
) -> RoundView:
    here = frozenset(planned if live is None else live)
    return RoundView(1, frozenset(planned), frozenset(accepted), here, ended=frozenset(ended))


def test_lists_are_by_code_point():
    found = Lists.of(replace(view(""), planned={"9", "10", "a", "Z"}), GatherSettings(primaries=2))

    assert found == Lists(("10", "9"), ("Z", "a"))


def test_whoever_lost_its_rows_keeps_its_place_in_the_lists():
    """Else a skip would make a primary of a reserve before the others are settled."""
    found = Lists.of(view("bcd", ended="a"), GatherSettings(primaries=2))

    assert found == Lists(("a", "b"), ("c", "d"))


@given(views(), settings)
def test_only_live_holders_without_a_contribution_are_wanted(seen: RoundView, told: GatherSettings):
    wanted = closing.wanted(seen, told)

    assert wanted <= (seen.planned & seen.live) - seen.accepted


@given(views(), settings)
def test_no_reserve_is_wanted_while_a_primary_in_time_may_come(
    seen: RoundView, told: GatherSettings
):
    found, wanted = Lists.of(seen, told), closing.wanted(seen, told)
    is_late = 0 < told.primary_seconds <= seen.open_seconds
    coming = {*found.primaries} & seen.planned & seen.live - seen.accepted

    assert is_late or not coming or wanted.isdisjoint(found.reserves)


@given(views(), settings)
def test_never_more_are_wanted_than_are_missing(seen: RoundView, told: GatherSettings):
    free, found = closing.places(seen, told), Lists.of(seen, told)
    wanted = closing.wanted(seen, told)

    assert len(wanted & {*found.reserves}) <= free
    assert free or not wanted
    assert not told.primaries or len(seen.accepted) + free >= told.primaries


@given(views(), settings)
def test_reserves_are_wanted_in_order(seen: RoundView, told: GatherSettings):
    found, wanted = Lists.of(seen, told), closing.wanted(seen, told)
    coming = (seen.planned & seen.live) - seen.accepted
    is_late = 0 < told.primary_seconds <= seen.open_seconds
    able = [r for r in found.reserves if r in coming and (not is_late or r in seen.announced)]

    taken = [r for r in able if r in wanted]
    assert taken == able[: len(taken)]


@given(views(), settings)
def test_after_the_time_of_primaries_only_those_who_announced_are_waited_for(
    seen: RoundView, told: GatherSettings
):
    late = replace(seen, open_seconds=5.0)

    wanted = closing.wanted(late, told.model_copy(update={"primary_seconds": 5.0}))

    assert wanted <= seen.announced


@pytest.mark.parametrize(
    ("seen", "is_due"),
    [
        (view("abc", "ab"), True),
        (view("abc", "a"), False),
        (view("abc", "ac"), True),  # full by a reserve
        (view("bc", "b", ended="a"), False),  # c steps in
        (view("bc", "bc", ended="a"), True),
        (view("abc", "a", live="ac"), False),
        (view("abc", "a", live="a"), True),  # nobody is left
        (view("abc", "", live=""), False),  # below min_workers
    ],
)
def test_round_closes_when_enough_are_in_or_nobody_is_left(seen: RoundView, is_due: bool):
    strategy = registry.of(manifest(gather__primaries=2))

    assert strategy.is_due(seen, seconds=0.0) is is_due


def test_quorum_and_grace_close_a_round_as_in_other_runs():
    strategy = registry.of(
        manifest(membership={"quorum": 2, "grace_seconds": 5.0}, gather__primaries=3)
    )
    seen = view("abcd", "ab")

    assert not strategy.is_due(seen, seconds=4.0)
    assert strategy.has_quorum(seen) and strategy.is_due(seen, seconds=5.0)
