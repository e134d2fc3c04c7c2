"""How a step is committed: one set for all spans, named absentees, and nothing twice."""

import math
from typing import Any

import pytest

from atoll.errors import (
    ConfigError,
    Conflict,
    Diverged,
    EmptySum,
    MissingRanks,
    NotReady,
    ProtocolError,
    StaleContribution,
)
from atoll.protocol.manifest import InnerSettings, ShardedSettings
from atoll.strategies.sharded.commit import Commit, Folded, Policy, Progress
from atoll.strategies.sharded.quorum import settings

SIZE = 3
ALL = frozenset(range(SIZE))


def policy(kind: Any = "quorum", *, min_workers: int = 2, deadline_seconds: float = 5.0) -> Policy:
    return Policy(kind=kind, size=SIZE, min_workers=min_workers, deadline_seconds=deadline_seconds)


def sets(*of_owners: str) -> dict[int, frozenset[int]]:
    return {owner: frozenset(map(int, found)) for owner, found in enumerate(of_owners)}


@pytest.mark.parametrize("kind", ["strict", "quorum"])
@pytest.mark.parametrize("is_late", [False, True])
def test_all_are_chosen_as_soon_as_all_are_whole_everywhere(kind, is_late):
    assert policy(kind).chosen(sets("012", "012", "012"), is_late=is_late) == ALL


@pytest.mark.parametrize("kind", ["strict", "quorum"])
@pytest.mark.parametrize("arrived", [sets("012", "012"), sets("012", "01", "012"), {}], ids=str)
def test_nobody_is_chosen_before_the_deadline_while_somebody_is_missing(kind, arrived):
    assert policy(kind).chosen(arrived, is_late=False) is None


def test_quorum_chooses_at_the_deadline_who_is_whole_at_every_owner():
    """0 is whole at one owner alone: it is in no span's sum."""
    assert policy().chosen(sets("012", "12", "12"), is_late=True) == frozenset({1, 2})


@pytest.mark.parametrize(
    ("kind", "arrived", "missing"),
    [
        ("strict", sets("012", "12", "12"), (0,)),
        ("strict", sets("0", "0", "0"), (1, 2)),
        ("quorum", sets("01", "12", "012"), (0, 2)),  # two at each owner, one at all
        ("quorum", sets("", "", ""), (0, 1, 2)),
        ("quorum", sets("012", "012"), (2,)),  # an owner that says nothing
    ],
)
def test_too_few_at_the_deadline_are_missing_by_name(kind, arrived, missing):
    with pytest.raises(MissingRanks, match="nothing is filled in") as refused:
        policy(kind).chosen(arrived, is_late=True)

    assert refused.value.ranks == missing


@pytest.mark.parametrize("changes", [{"min_workers": 0}, {"min_workers": 4}])
def test_more_or_fewer_workers_than_there_can_be_are_refused(changes):
    with pytest.raises(ConfigError, match="min_workers="):
        policy(**changes)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_deadline_that_is_none_is_refused(seconds):
    with pytest.raises(ConfigError, match="deadline_seconds="):
        policy(deadline_seconds=seconds)


@pytest.mark.parametrize(
    "changes",
    [
        {"exchange": "ring"},
        {"gradients": "int8"},
        {"parameters": "bf16"},
        {"residuals": True},
        {"onebit_warmup_steps": 3},
        {"transport": "torch_dist"},
    ],
    ids=str,
)
def test_setting_that_does_not_go_with_a_quorum_is_refused_by_name(changes):
    wanted: dict[str, Any] = {"commit": "quorum", "exchange": "direct"}
    made = {"group": 1, "version": 0, "size": 3, "min_workers": 5}
    [name] = changes

    with pytest.raises(ConfigError, match=f"sharded.{name}="):
        settings.of(ShardedSettings(**{**wanted, **changes}), InnerSettings(), **made)

    found = settings.of(ShardedSettings(**wanted), InnerSettings(), **made)  # the control
    assert (found.policy.kind, found.policy.needed) == ("quorum", 3)


# The leader


def collected(*of_owners: str, is_late: bool = True) -> Commit:
    commit = Commit(7, policy())
    for owner, senders in sets(*of_owners).items():
        commit.arrived(owner, senders)
    commit.decide(is_late=is_late)
    return commit


def test_commit_goes_through_its_stages():
    commit = collected("012", "12", "12")
    assert (commit.stage, commit.senders, commit.due()) == ("fold", frozenset({1, 2}), [0, 1, 2])

    for owner, squares in enumerate((9.0, 12.0, 4.0)):
        assert commit.outcome is None
        commit.folded(owner, Folded(squares, 2.5, 30, 0.1))
    assert (commit.stage, commit.due()) == ("update", [0, 1, 2])
    for owner in range(SIZE):
        commit.updated(owner)

    assert (commit.stage, commit.due()) == ("done", [])
    outcome = commit.outcome
    assert outcome is not None
    assert (outcome.senders, outcome.excluded) == (frozenset({1, 2}), frozenset({0}))
    assert (outcome.loss_sum, outcome.tokens, outcome.norm) == (2.5, 30, 5.0)


def test_answers_that_come_again_or_late_change_nothing():
    commit = collected("01", "01", "01")
    commit.arrived(0, ALL)  # who is whole now is too late
    assert commit.senders == frozenset({0, 1})

    for owner in (0, 0, 1, 1, 2):
        commit.folded(owner, Folded(1.0, 2.0, 3, 0.1))
    outcome = commit.outcome
    commit.folded(1, Folded(1.0, 2.0, 3, 0.1))
    for owner in (0, 0, 0):
        commit.updated(owner)

    assert commit.outcome is outcome
    assert (commit.stage, commit.due()) == ("update", [1, 2])


def test_owner_that_contradicts_itself_is_refused():
    commit = collected("01", "01", "01")
    commit.folded(0, Folded(1.0, 2.0, 3, 0.1))

    with pytest.raises(Conflict, match="owner 0"):
        commit.folded(0, Folded(1.5, 2.0, 3, 0.1))


@pytest.mark.parametrize(
    "other", [Folded(1.0, 2.0, 4, 0.1), Folded(1.0, 2.5, 3, 0.1), Folded(1.0, 2.0, 3, 0.2)]
)
def test_owners_that_count_differently_are_refused(other):
    """What owners with sets of their own would do."""
    commit = collected("01", "01", "01")
    commit.folded(0, Folded(1.0, 2.0, 3, 0.1))
    commit.folded(1, other)

    with pytest.raises(ProtocolError, match="owner 1"):
        commit.folded(2, Folded(1.0, 2.0, 3, 0.1))
    assert commit.stage == "fold"


@pytest.mark.parametrize("squares", [math.nan, math.inf, -9.0])
def test_norm_that_is_none_ends_the_step_before_any_update(squares):
    commit = collected("01", "01", "01")
    commit.folded(0, Folded(1.0, 2.0, 3, 0.1))
    commit.folded(1, Folded(squares, 2.0, 3, 0.1))

    with pytest.raises(Diverged):
        commit.folded(2, Folded(1.0, 2.0, 3, 0.1))
    assert (commit.stage, commit.outcome) == ("fold", None)


def test_step_without_rows_is_an_empty_sum():
    commit = collected("012", "012", "012", is_late=False)
    commit.folded(0, Folded(0.0, 0.0, 0, 0.1))
    commit.folded(1, Folded(0.0, 0.0, 0, 0.1))

    with pytest.raises(EmptySum, match=r"ranks \[0, 1, 2\]"):
        commit.folded(2, Folded(0.0, 0.0, 0, 0.1))


def test_step_whose_rows_are_all_of_late_ranks_misses_them_by_name():
    commit = collected("01", "01", "01")
    commit.folded(0, Folded(0.0, 0.0, 0, 0.1))
    commit.folded(1, Folded(0.0, 0.0, 0, 0.1))

    with pytest.raises(MissingRanks, match="all rows of step") as refused:
        commit.folded(2, Folded(0.0, 0.0, 0, 0.1))
    assert refused.value.ranks == (2,)


def test_squares_are_added_in_the_order_of_the_ranks_whoever_answers_first():
    big, small = 1e16, 1.0
    found = []
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        commit = collected("012", "012", "012", is_late=False)
        for owner in order:
            commit.folded(owner, Folded(big if owner == 0 else small, 2.0, 3, 0.1))
        assert commit.outcome is not None
        found.append(commit.outcome.norm)

    assert found == [math.sqrt(big + small + small)] * 3
    assert found[0] != math.sqrt(small + small + big)  # the control


# An owner


def test_owner_folds_and_updates_once():
    progress, pair, found = Progress(4), frozenset({0, 1}), Folded(1.0, 2.0, 3, 0.1)

    assert progress.may_fold(5, pair) is None
    progress.has_folded(pair, found)
    assert progress.may_fold(5, pair) is found
    assert progress.may_update(5, pair)
    progress.has_updated(5)

    assert progress.version == 5
    assert not progress.may_update(5, pair)
    with pytest.raises(StaleContribution, match="step 6 is the present one"):
        progress.may_fold(5, pair)
    with pytest.raises(StaleContribution):
        progress.may_update(4, pair)


def test_owner_refuses_another_set():
    progress = Progress(4)
    progress.has_folded(frozenset({0, 1}), Folded(1.0, 2.0, 3, 0.1))

    with pytest.raises(Conflict, match="a step has one set"):
        progress.may_fold(5, ALL)
    with pytest.raises(Conflict):
        progress.may_update(5, ALL)
    assert progress.may_update(5, frozenset({0, 1}))


def test_owner_neither_skips_a_step_nor_a_stage():
    progress = Progress(4)

    with pytest.raises(NotReady):
        progress.may_fold(6, ALL)
    with pytest.raises(NotReady):
        progress.may_update(6, ALL)
    with pytest.raises(ProtocolError, match="fold it first"):
        progress.may_update(5, ALL)
    assert progress.version == 4
