"""What synchronous DiLoCo answers."""

import pytest

from atoll.strategies.base import ALL, Fragments, RoundView, run_layout
from atoll.strategies.diloco.sync import Sync
from tests.clusters import SMALL, manifest_for

LIVE = ("b", "a", "c")


def sync(**changes: object) -> Sync:
    return Sync.of(manifest_for(SMALL, changes))


def view(planned: str, accepted: str = "", live: str | None = None) -> RoundView:
    here = planned if live is None else live
    return RoundView(4, frozenset(planned), frozenset(accepted), frozenset(here))


def test_one_round_is_open_and_nobody_is_dialled():
    assert (sync().lead, sync().dials) == (0, False)


def test_every_round_carries_the_only_fragment_which_is_the_model():
    strategy = sync()

    fragments = Fragments.of(strategy, SMALL)

    assert {strategy.fragment(number, is_last=False) for number in range(9)} == {0}
    assert fragments.parts == (fragments[ALL],)
    assert fragments[0].layout == SMALL


def test_layout_of_a_run_is_the_models_own():
    assert run_layout(sync(), SMALL) == SMALL


def test_every_live_island_gets_the_same_rows_whatever_its_speed():
    strategy = sync(**{"sync_every": 5, "inner.batch": 3})

    assert strategy.rows(7, LIVE, {"a": 1.0, "b": 1e6}) == dict.fromkeys(LIVE, 15)


def test_round_begins_from_the_version_before_it():
    assert [sync().needs(number) for number in (1, 2, 9)] == [0, 1, 8]


def test_contribution_holds_rows_of_its_own_round_only():
    assert [sync().first(5, began) for began in (1, 4, 5)] == [5, 5, 5]


@pytest.mark.parametrize("step", [0, 1, 100])
def test_island_merges_nothing_while_it_trains(step):
    assert list(sync().due(3, step)) == []


def test_contribution_goes_to_its_own_round_while_that_is_open():
    assert sync().destination(3, [3]) == 3
    assert sync().destination(3, [2, 3]) == 3


def test_contribution_to_a_round_that_is_not_open_is_stale():
    assert sync().destination(3, []) is None
    assert sync().destination(3, [4]) is None


@pytest.mark.parametrize(("weighting", "weight"), [("equal", 1), ("tokens", 96)])
def test_weight_follows_the_setting(weighting, weight):
    assert sync(weighting=weighting).weight(tokens=96) == weight


def test_closing_rule_is_that_of_the_membership_settings():
    strategy = sync(
        **{
            "membership.min_workers": 1,
            "membership.quorum": 2,
            "membership.grace_seconds": 5.0,
        }
    )
    seen = view("abc", "ab")

    assert strategy.has_quorum(seen)
    assert not strategy.has_quorum(view("abc", "a"))
    assert not strategy.is_due(seen, seconds=4.9)
    assert strategy.is_due(seen, seconds=5.0)
    assert strategy.waiting_for(seen) == {"c"}
    assert not strategy.is_short(seen)
    assert strategy.is_short(view("abc", "", live=""))


def test_freeze_ends_what_is_left_of_its_own_round_and_nothing_else():
    leases = {(3, "a"), (3, "b"), (4, "a")}

    assert sync().ended(leases, closing=3, live=LIVE) == {(3, "a"), (3, "b")}


def test_step_of_the_outer_optimizer_counts_rounds_not_contributions():
    strategy = sync(**{"download.codec": "bf16"})

    step = strategy.outer(6, 999)

    assert step.step == 6
    assert step.download == strategy.manifest.download.build()
    assert step.optimizer == strategy.manifest.outer.build()
    assert step.noise is not None and step.noise != strategy.outer(7, 999).noise
