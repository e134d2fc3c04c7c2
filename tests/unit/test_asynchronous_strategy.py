"""What asynchronous DiLoCo answers, and what its outer step does to the weights."""

import struct
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from atoll.codecs.fp32.codec import Fp32
from atoll.errors import ConfigError, EmptySum
from atoll.layout import GROUP_ELEMENTS, Layout
from atoll.protocol.manifest import Manifest
from atoll.strategies import registry
from atoll.strategies.base import RoundView
from atoll.strategies.diloco.asynchronous import Asynchronous
from atoll.strategies.outer import OuterState, OuterStep, fresh_state
from atoll.strategies.ticks import Ticks
from tests.clusters import SMALL, manifest_for

LIVE = ("a", "b", "c")
EPS = float(torch.finfo(torch.float32).eps)
LARGE = Layout.of([("a", (3 * GROUP_ELEMENTS + 77,), "float32")])  # several tiles


def manifest(**changes: object) -> Manifest:
    delayed = {"mode": "async", "outer.optimizer": "delayed_nesterov"}
    return manifest_for(SMALL, {**delayed, **changes})


def asynchronous(**changes: object) -> Asynchronous:
    return Asynchronous.of(manifest(**changes))


def view(planned: str, accepted: str = "", live: str = "abc") -> RoundView:
    return RoundView(4, frozenset(planned), frozenset(accepted), frozenset(live))


# Settings


def test_registry_gives_it_for_the_mode():
    assert registry.of(manifest()) == Asynchronous(manifest())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_fragments": 2}, "num_fragments=2 needs mode 'streaming'"),
        ({"fragment_pattern": "sequential"}, "fragment_pattern='sequential' needs mode"),
        ({"delay_steps": 1}, "delay_steps=1 needs mode 'streaming'"),
        ({"local_weight": 0.5}, "local_weight=0.5 needs mode 'streaming'"),
        ({"outer.optimizer": "adam"}, "outer.optimizer='adam' is not for mode 'async'"),
        ({"membership.quorum": 2}, "membership.quorum=2 is not for mode 'async'"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(changes, says):
    with pytest.raises(ConfigError, match=says):
        registry.of(manifest(**changes))


def test_its_optimizer_is_refused_by_name_elsewhere():
    with pytest.raises(ConfigError, match="'delayed_nesterov' needs mode 'async'"):
        registry.of(manifest(mode="sync"))


@pytest.mark.parametrize("optimizer", ["sgd", "nesterov", "delayed_nesterov"])
def test_optimizers_that_go_contribution_by_contribution_are_taken(optimizer):
    found = asynchronous(**{"outer.optimizer": optimizer}).outer(3, 9)

    assert found.optimizer.name == optimizer


# Who trains what


def test_plan_gives_no_rows_and_an_idle_island_is_given_a_round_after_its_version():
    strategy = asynchronous()

    assert strategy.rows(3, LIVE, {}) == {}
    assert strategy.asked(2, [3, 4], ()) == 3
    assert strategy.needs(3) == 2


def test_island_waits_while_the_round_after_its_version_is_computed():
    assert asynchronous().asked(2, [4], ()) is None


def test_island_waits_until_its_own_work_is_in_the_version_it_starts_from():
    """Else what it has just handed in would be trained again from weights without it."""
    assert asynchronous().asked(2, [3, 4], [3]) is None


@pytest.mark.parametrize(
    ("speeds", "steps"),
    [
        ({}, 10),  # unknown: a whole round
        ({"b": 9.0}, 10),
        ({"a": 5.0, "b": 5.0}, 10),
        ({"a": 5.0, "b": 20.0}, 2),  # 2.5, rounded down
        ({"a": 20.0, "b": 5.0}, 10),
        ({"a": 1.0, "b": 1e6}, 1),  # never none
    ],
)
def test_steps_follow_the_speed(speeds, steps):
    strategy = asynchronous(**{"dylu": True, "sync_every": 10, "inner.batch": 3})

    assert strategy.piece("a", lambda: speeds) == steps * 3


def test_speed_does_not_matter_unless_it_is_asked_for():
    strategy = asynchronous(sync_every=10)

    assert strategy.piece("a", pytest.fail) == strategy.manifest.rows_per_round


def test_rate_of_an_island_depends_on_nothing_that_others_do():
    assert [asynchronous().abreast(holding) for holding in (1, 5)] == [1, 1]


# Rounds


def test_contribution_joins_the_oldest_open_round():
    strategy = asynchronous(max_staleness=2)

    assert strategy.destination(3, [3, 4]) == 3
    assert strategy.destination(3, [5, 6]) == 5
    assert strategy.destination(3, [6, 7]) is None
    assert strategy.destination(3, []) is None


def test_round_closes_with_one_contribution_when_its_window_is_over():
    strategy = asynchronous(**{"membership.grace_seconds": 5.0})
    seen = view("ab", "a")

    assert strategy.has_quorum(seen) and not strategy.has_quorum(view("ab"))
    assert not strategy.is_due(seen, seconds=4.9)
    assert strategy.is_due(seen, seconds=5.0)


def test_round_closes_at_once_when_every_live_holder_is_in():
    strategy = asynchronous(**{"membership.grace_seconds": 5.0})

    assert strategy.is_due(view("ab", "ab"), seconds=0.0)
    assert strategy.is_due(view("ab", "a", live="ac"), seconds=0.0)
    assert not strategy.is_due(view("ab", ""), seconds=9.0)


def test_round_does_not_close_below_min_workers_live_islands():
    strategy = asynchronous(**{"membership.min_workers": 2})

    assert not strategy.is_due(view("ab", "a", live="a"), seconds=9.0)
    assert strategy.is_due(view("ab", "a", live="ab"), seconds=9.0)
    assert not strategy.is_short(view("", "", live="a"))


def test_freeze_ends_the_leases_of_the_dead_and_the_too_stale():
    leases = {(3, "a"), (4, "a"), (5, "b"), (5, "dead")}
    strategy = asynchronous(max_staleness=2)

    assert strategy.ended(leases, closing=5, live=LIVE) == {(3, "a"), (5, "dead")}


def test_first_holder_evaluates_and_the_last_version_is_for_all():
    strategy = asynchronous()

    assert list(strategy.evaluators("b", [], LIVE, is_last=False)) == ["b"]
    assert list(strategy.evaluators("b", [], LIVE, is_last=True)) == ["a", "b", "c"]


# Factors


def rounded(value: float) -> float:
    return float(np.float32(value))


@pytest.mark.parametrize("staleness", [0, 1, 2, 8])
def test_factor_follows_the_staleness_where_it_is_asked_for(staleness):
    found = asynchronous(staleness_weighting="inverse_sqrt").factor(staleness=staleness, tokens=7)

    assert found == rounded((1 + staleness) ** -0.5)
    assert asynchronous().factor(staleness=staleness, tokens=7) == 1.0


def test_factor_follows_the_tokens_where_it_is_asked_for():
    strategy = asynchronous(**{"weighting": "tokens", "staleness_weighting": "inverse_sqrt"})
    whole = strategy.manifest.rows_per_round * strategy.manifest.data.identity["block"]

    assert strategy.factor(staleness=0, tokens=whole) == 1.0
    assert strategy.factor(staleness=2, tokens=5) == rounded(3**-0.5 * (5 / whole))


def test_factor_is_an_fp32_number():
    found = asynchronous(staleness_weighting="inverse_sqrt").factor(staleness=2, tokens=1)

    assert struct.unpack("<f", struct.pack("<f", found))[0] == found


# The outer step


class Source:
    """A displacement in memory."""

    weight = 1

    def __init__(self, key: int, factor: float = 1.0) -> None:
        drawn = np.random.default_rng(key).standard_normal(LARGE.size)
        self.values = torch.from_numpy(drawn.astype(np.float32))
        self.factor = factor

    def tile(self, span):
        return self.values[span.start : span.stop]

    def raw(self, span):
        return self.tile(span).view(torch.uint8)


def fresh(step: OuterStep) -> OuterState:
    start = Source(99).values.clone()
    return fresh_state(LARGE, start, optimizer=step.optimizer, download=step.download)


def applied(rounds: list[list[Source]], tile_bytes: int = 4 * GROUP_ELEMENTS, **changes: object):
    """The state after these rounds, with the count of contributions as the ledger gives it."""
    strategy = asynchronous(**changes)
    state = fresh(strategy.outer(1, 0))
    ticks = [0]
    for number, sources in enumerate(rounds, start=1):
        step = replace(strategy.outer(number, ticks[-1]), tile_bytes=tile_bytes)
        step.apply(state, sources, None)
        ticks.append(ticks[-1] + len(sources))
    return state


def same(mine: OuterState, theirs: OuterState) -> bool:
    pairs = zip(mine.named.values(), theirs.named.values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


SOURCES = [Source(key) for key in range(5)]


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_two_in_one_window_move_the_weights_as_two_rounds_in_a_row(delay):
    together = applied([SOURCES[:2], SOURCES[2:]], **{"outer.delay": delay})
    one_by_one = applied([[source] for source in SOURCES], **{"outer.delay": delay})

    assert same(together, one_by_one)


def test_mean_in_place_of_ticks_is_seen(monkeypatch):
    """The control: averaged, who came together would count."""
    one_by_one = applied([[source] for source in SOURCES])
    monkeypatch.setattr(Ticks, "moved", OuterStep.moved)

    assert not same(applied([SOURCES[:2], SOURCES[2:]]), one_by_one)


def test_count_that_starts_anew_is_seen():
    """The control of the ticks before: with a delay of 2, three and two are not two and three."""
    strategy = asynchronous()
    state = fresh(strategy.outer(1, 0))
    for number, sources in ((1, SOURCES[:3]), (2, SOURCES[3:])):
        strategy.outer(number, 0).apply(state, sources, None)

    assert not same(state, applied([SOURCES[:3], SOURCES[3:]]))


@pytest.mark.parametrize("islands", [2, 4])
def test_as_many_as_islands_and_nothing_stale_is_a_synchronous_round(islands):
    """Equal to n eps: both round each of a few operations on numbers of this size once."""
    groups = [[Source(10 * r + i) for i in range(islands)] for r in range(4)]
    ours = applied(groups, **{"outer.delay": islands})
    sync = registry.of(manifest_for(SMALL, {"outer.optimizer": "nesterov"}))
    state = fresh(sync.outer(1, 0))
    for number, sources in enumerate(groups, start=1):
        sync.outer(number, 0).apply(state, sources, None)

    size = state.master.abs() + 4 * sum(s.values.abs() for group in groups for s in group)
    n = 8 * islands * len(groups)
    assert bool(((ours.master - state.master).abs() <= n * EPS * size).all())
    assert not ours.slots["buffer"].any()


def test_step_follows_an_independent_reference_with_factors():
    factors = [1.0, rounded(2**-0.5), rounded(3**-0.5), 1.0, 0.25]
    sources = [Source(key, factor) for key, factor in enumerate(factors)]

    ours = applied([sources[:2], sources[2:]], **{"outer.delay": 2})

    p, m, b = Source(99).values.numpy().copy(), *np.zeros((2, LARGE.size), np.float32)
    lr, mu, n = np.float32(0.7), np.float32(0.9), np.float32(2)
    for tick, source in enumerate(sources, start=1):
        g = source.values.numpy() * np.float32(source.factor)
        p, b = p - lr * (g / n), b + g
        if tick % 2 == 0:
            m = mu * m + b / n
            p, b = p - lr * (mu * m), np.zeros_like(b)
    wanted = {"master": p, "momentum": m, "buffer": b}
    assert {name: t.numpy().tobytes() for name, t in ours.named.items()} == {
        name: values.tobytes() for name, values in wanted.items()
    }


@pytest.mark.parametrize("groups", [1, 2, 64])
def test_bits_do_not_depend_on_the_tile_size(groups):
    rounds = [SOURCES[:2], SOURCES[2:]]

    assert same(applied(rounds, tile_bytes=4 * groups * GROUP_ELEMENTS), applied(rounds))


def test_step_leaves_the_contributions_as_they_are():
    before = [source.values.clone() for source in SOURCES]

    applied([SOURCES])

    assert all(torch.equal(a, s.values) for a, s in zip(before, SOURCES, strict=True))


def test_round_without_a_contribution_is_refused_and_moves_nothing():
    step = asynchronous().outer(1, 0)
    state = fresh(step)
    before = state.master.clone()

    with pytest.raises(EmptySum):
        step.apply(state, [], None)

    assert torch.equal(state.master, before)


def test_order_of_contributions_matters_to_the_bits():
    """The control: that it is fixed, by worker_id, is what makes them the same everywhere."""
    states = [applied([order]) for order in (SOURCES, SOURCES[::-1])]

    assert all(not same(a, b) for a, b in pairwise(states))


def test_published_payload_is_of_the_weights_after_the_last_tick():
    step = asynchronous(**{"download.codec": "fp32"}).outer(1, 0)
    state, sent = fresh(step), torch.zeros(LARGE.size)

    def sink(span, payload: Tensor) -> None:
        sent[span.start : span.stop] = Fp32().decode(payload, len(span))

    step.apply(state, SOURCES[:3], sink)

    assert torch.equal(sent, state.master)
