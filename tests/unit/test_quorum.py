"""The rule that closes a round, on sets alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.manifest import Manifest, MembershipSettings
from atoll.strategies.base import RoundView
from atoll.strategies.diloco.sync import Sync

WORKERS = st.frozensets(st.sampled_from("abcdef"))


def view(planned: str, accepted: str = "", live: str | None = None) -> RoundView:
    return RoundView(
        1, frozenset(planned), frozenset(accepted), frozenset(planned if live is None else live)
    )


def rule(**settings) -> Sync:
    return Sync(Manifest.model_construct(membership=MembershipSettings(**settings)))


def due(seen: RoundView, *, seconds: float = 0.0, **settings) -> bool:
    return rule(**settings).is_due(seen, seconds=seconds)


def test_round_is_due_when_every_planned_worker_is_in():
    assert due(view("ab", "ab"), min_workers=2)


def test_round_waits_for_a_live_planned_worker():
    assert not due(view("ab", "a"), min_workers=1)


def test_lone_worker_never_closes_a_round_that_needs_two():
    assert not due(view("a", "a"), min_workers=2, seconds=1e12)


def test_round_without_workers_is_not_due():
    """After every worker has gone the expected set is empty."""
    assert not due(view("", "", live=""), min_workers=1, seconds=1e12)


def test_dead_worker_is_not_waited_for():
    assert due(view("abc", "ab", live="ab"), min_workers=2)


def test_worker_that_contributed_and_died_still_counts():
    assert due(view("ab", "ab", live=""), min_workers=2)


def test_quorum_closes_only_after_the_grace_period():
    seen = view("abc", "ab")

    early = due(seen, min_workers=2, quorum=2, grace_seconds=5.0, seconds=4.999)
    late = due(seen, min_workers=2, quorum=2, grace_seconds=5.0, seconds=5.0)

    assert (early, late) == (False, True)


def test_grace_period_does_not_run_below_the_quorum():
    assert not rule(min_workers=1, quorum=2).has_quorum(view("abc", "a"))


def test_quorum_is_all_planned_workers_when_none_is_set():
    waits_for_all = rule(min_workers=1)

    assert not waits_for_all.has_quorum(view("abc", "ab"))
    assert waits_for_all.has_quorum(view("abc", "abc"))


def test_worker_that_is_live_but_not_planned_is_not_waited_for():
    assert due(view("ab", "ab", live="abc"), min_workers=2)


@given(WORKERS, WORKERS, WORKERS, st.integers(1, 4), st.floats(0, 1e9))
def test_round_is_never_due_below_min_workers(planned, accepted, live, min_workers, seconds):
    """This holds for any sets of workers and any time."""
    seen = RoundView(1, planned, accepted & planned, live)

    is_due = due(seen, min_workers=min_workers, quorum=min_workers, seconds=seconds)

    assert not is_due or len(seen.accepted) >= min_workers


@pytest.mark.parametrize(
    ("planned", "accepted", "live", "short"),
    [
        ("ab", "", "ab", False),
        ("ab", "", "a", True),
        ("ab", "b", "a", False),
        ("ab", "a", "a", True),
        ("", "", "", True),
        ("a", "", "abc", True),
    ],
)
def test_round_is_short_when_min_workers_is_out_of_reach(planned, accepted, live, short):
    """Somebody else must be let in, or it would wait for ever."""
    assert rule(min_workers=2).is_short(view(planned, accepted, live)) is short
