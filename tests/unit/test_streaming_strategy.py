"""The answers of a streaming run: which fragment, when it is merged, what a contribution holds."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import ConfigError
from atoll.layout import Layout
from atoll.strategies import registry
from atoll.strategies.base import ALL, run_layout
from atoll.strategies.diloco import blocks
from tests.clusters import SMALL, manifest_for

NAMES = ("emb", "head", "ln", *(f"blocks.{n}.{part}" for n in range(12) for part in ("w", "b")))
SIZES = {"emb": 50, "head": 40, "ln": 3, "w": 7, "b": 3}
GPT = Layout.of((name, (SIZES[name.rpartition(".")[2]],), "float32") for name in NAMES)


def streaming(**settings: Any) -> Any:
    return registry.of(manifest_for(SMALL, {"mode": "streaming", **settings}))


def schedule(*, every: int, fragments: int, delay: int) -> Any:
    return streaming(sync_every=every, num_fragments=fragments, delay_steps=delay)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[int, int, int]:
    steps, fragments = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    return steps, fragments, draw(st.integers(0, steps * fragments - 1))


@given(schedules())
def test_every_round_is_merged_exactly_so_many_steps_after_its_hand_in(chosen):
    steps, fragments, delay = chosen
    asked = schedule(every=steps * fragments, fragments=fragments, delay=delay)
    merged: dict[int, int] = {}  # round -> steps made by then

    for number in range(1, 12):
        for done in range(asked.needs(number) + 1):
            merged.setdefault(done, (number - 1) * steps)
        for step in range(1, steps + 1):
            for due in asked.due(number, step):
                merged.setdefault(due, (number - 1) * steps + step)

    whole = {n: at for n, at in merged.items() if 0 < n <= 11 - asked.lead - 1}
    assert whole == {n: n * steps + delay for n in whole}
    assert len(whole) == max(0, 11 - asked.lead - 1)


@pytest.mark.parametrize(
    ("every", "fragments", "delay", "lead"),
    [
        (8, 1, 0, 0),
        (8, 4, 0, 0),
        (8, 4, 1, 1),
        (8, 4, 2, 1),
        (8, 4, 3, 2),
        (8, 4, 7, 4),
        (8, 1, 7, 1),
    ],
)
def test_lead_is_the_delay_in_rounds_rounded_up(every, fragments, delay, lead):
    assert schedule(every=every, fragments=fragments, delay=delay).lead == lead


def test_fragments_take_turns_and_the_last_round_carries_all():
    asked = schedule(every=6, fragments=3, delay=0)

    turns = [asked.fragment(number, is_last=False) for number in range(1, 8)]

    assert turns == [0, 1, 2, 0, 1, 2, 0]
    assert asked.fragment(8, is_last=True) == ALL
    assert [asked.may_end(fragment) for fragment in (0, 1, 2, ALL)] == [False, False, False, True]


def test_one_fragment_needs_no_round_of_all():
    asked = schedule(every=6, fragments=1, delay=2)

    assert asked.fragment(5, is_last=True) == 0
    assert asked.may_end(0)


def test_contribution_holds_the_rounds_since_its_fragment_was_handed_in():
    asked = schedule(every=6, fragments=3, delay=2)

    assert [asked.first(number, 1) for number in range(1, 7)] == [1, 1, 1, 2, 3, 4]
    assert asked.first(6, 5) == 5  # it set out from published weights at round 5


def test_round_is_a_part_of_the_steps_between_two_syncs():
    asked = streaming(**{"sync_every": 8, "num_fragments": 4, "inner.batch": 3})

    assert asked.rows(1, ["a", "b"], {}) == {"a": 6, "b": 6}


def test_optimizer_counts_the_steps_of_a_fragment():
    asked = schedule(every=6, fragments=3, delay=0)

    assert [asked.outer(number, 0).step for number in range(1, 8)] == [1, 1, 1, 2, 2, 2, 3]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"sync_every": 7, "num_fragments": 2},
            "sync_every=7 is not a multiple of num_fragments=2",
        ),
        ({"sync_every": 4, "delay_steps": 4}, "delay_steps=4 is not below sync_every=4"),
        ({"sync_every": 4, "dylu": True}, "dylu=True needs mode 'async'"),
        ({"sync_every": 4, "max_staleness": 3}, "max_staleness=3 needs mode 'async'"),
    ],
)
def test_schedule_that_does_not_come_out_even_is_refused_by_name(settings, said):
    with pytest.raises(ConfigError, match=said):
        streaming(**settings)


# Which tensors go together


def natural(name: str) -> int:
    return int(name.split(".")[1])


@pytest.mark.parametrize("count", [2, 3, 5, 12])
def test_strided_deals_blocks_out_by_their_number(count):
    dealt = blocks.deal(GPT, count, "strided")

    for fragment, names in enumerate(dealt):
        assert {natural(n) % count for n in names if n.startswith("blocks")} == {fragment}


@pytest.mark.parametrize("count", [2, 3, 5, 12])
def test_sequential_gives_runs_of_blocks(count):
    dealt = blocks.deal(GPT, count, "sequential")

    runs = [sorted({natural(n) for n in names if n.startswith("blocks")}) for names in dealt]
    assert [number for run in runs for number in run] == list(range(12))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1


@pytest.mark.parametrize("pattern", ["strided", "sequential"])
@pytest.mark.parametrize("count", [1, 2, 4, 7, 12])
def test_layout_in_the_order_of_its_fragments_is_cut_into_the_same_ones(count, pattern):
    dealt = blocks.deal(GPT, count, pattern)

    ordered = GPT.ordered(name for names in dealt for name in names)

    assert blocks.deal(ordered, count, pattern) == dealt
    assert sorted(name for names in dealt for name in names) == sorted(NAMES)
    assert all(dealt)


@pytest.mark.parametrize(
    "names",
    [("h.1.w", "h.01.w"), ("h.2.0.w", "h.1²3.0.w"), ("x1", "x01"), ("h.²", "h.1²2")],
    ids=str,
)
def test_cut_does_not_depend_on_the_order_of_odd_names(names):
    cuts = [
        blocks.deal(Layout.of((name, (4,), "float32") for name in order), 2, "strided")
        for order in (names, names[::-1])
    ]

    assert cuts[0] == cuts[1]


def test_tensors_of_no_block_go_to_the_lightest_fragment_largest_first():
    dealt = blocks.deal(GPT, 4, "strided")  # 30 elements of blocks in each

    where = {name: n for n, names in enumerate(dealt) for name in names if "." not in name}
    assert where == {"emb": 0, "head": 1, "ln": 2}


def test_blocks_of_unequal_size_are_cut_where_elements_balance():
    sizes = [60, 10, 10, 10, 10, 10, 10]
    layout = Layout.of((f"h.{n}.w", (size,), "float32") for n, size in enumerate(sizes))

    assert blocks.deal(layout, 2, "sequential") == [
        ["h.0.w"],
        [f"h.{n}.w" for n in range(1, 7)],
    ]


def test_model_without_blocks_is_dealt_out_by_tensors():
    layout = Layout.of([("b", (3,), "float32"), ("a", (2,), "float32"), ("c", (9,), "float32")])

    assert blocks.deal(layout, 2, "strided") == [["a", "c"], ["b"]]


def test_one_fragment_keeps_the_order_of_the_model():
    assert blocks.deal(GPT, 1, "strided") == [list(NAMES)]


def test_more_fragments_than_blocks_are_refused_by_name():
    with pytest.raises(ConfigError, match="num_fragments=13 is more than the 12 blocks"):
        blocks.deal(GPT, 13, "strided")


def test_run_layout_makes_every_fragment_one_span():
    asked = schedule(every=8, fragments=4, delay=0)

    layout = run_layout(asked, GPT)

    assert [t.name for t in layout.tensors] == [n for part in asked.cut(GPT) for n in part]
