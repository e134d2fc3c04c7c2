"""Who fetches whom and who owns what: properties of pure functions."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.codecs.topk.codec import TopK
from atoll.errors import ConfigError, ProtocolError
from atoll.gather import plan
from atoll.gather.budget import Budget
from atoll.gather.turns import Turns
from atoll.layout import ELEMENT_BYTES, GROUP_ELEMENTS, Layout
from tests.rank_groups import fibers

UIDS = st.text("abcXYZ0123456789._-", min_size=1, max_size=8)
SIZES = st.dictionaries(UIDS, st.integers(0, 10_000_000), max_size=40)
RANKS = st.integers(1, 9)
GROUP_BYTES = GROUP_ELEMENTS * ELEMENT_BYTES


@given(SIZES, RANKS)
def test_plan_gives_every_uid_one_rank_and_is_balanced_within_the_largest_object(sizes, ranks):
    given_to = plan.assign(sizes, ranks)

    assert list(given_to) == sorted(sizes)
    assert all(0 <= rank < ranks for rank in given_to.values())
    loads = [sum(sizes[u] for u, r in given_to.items() if r == rank) for rank in range(ranks)]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)


@given(st.sets(UIDS, max_size=40), RANKS, st.integers(0, 5))
def test_plan_of_equal_objects_gives_equally_many(uids, ranks, size):
    given_to = plan.assign(dict.fromkeys(uids, size), ranks)

    counts = [list(given_to.values()).count(rank) for rank in range(ranks)]
    assert max(counts) - min(counts) <= 1


@given(SIZES, RANKS, st.randoms(use_true_random=False))
def test_plan_does_not_depend_on_the_order_of_what_it_is_given(sizes, ranks, random):
    items = list(sizes.items())
    random.shuffle(items)

    assert plan.assign(dict(items), ranks) == plan.assign(sizes, ranks)
    assert plan.plan_hash(dict(items), ranks) == plan.plan_hash(sizes, ranks)


def test_plan_and_its_hash_are_what_they_were():
    """Ranks of different releases must agree, or stop."""
    sizes = {"10": 5, "9": 5, "a": 7, "b": 1}

    assert plan.assign(sizes, 2) == {"10": 1, "9": 1, "a": 0, "b": 0}
    assert plan.plan_hash(sizes, 2) == (
        "b98510a4f90cb1d30170f83e7a7cdf2ecd772a837fe67f005342731aa20372c2"
    )


@given(SIZES.filter(len), RANKS, st.data())
def test_plan_hash_differs_with_any_part_of_the_plan(sizes, ranks, data):
    uid = data.draw(st.sampled_from(sorted(sizes)))
    other = dict(sizes) | {uid: sizes[uid] + 1}
    fewer = {name: size for name, size in sizes.items() if name != uid}
    found = plan.plan_hash(sizes, ranks)

    others = [
        plan.plan_hash(other, ranks),
        plan.plan_hash(fewer, ranks),
        plan.plan_hash(sizes, ranks + 1),
        plan.plan_hash(sizes, ranks, about="others' keys"),
    ]
    assert found not in others


@given(st.lists(UIDS, max_size=20), st.sets(UIDS), st.integers(-2, 20), st.data())
def test_replacements_come_in_order_and_never_try_a_uid_twice(reserves, tried, missing, data):
    """Whatever fails, round after round."""
    seen: list[str] = []
    done = set(tried)
    for _ in range(len(reserves) + 1):
        found = plan.replacements(reserves, done, missing)
        assert len(found) <= max(0, missing)
        seen += found
        done.update(found)

    assert len(seen) == len(set(seen)) and not set(seen) & tried
    fresh = [uid for uid in dict.fromkeys(reserves) if uid not in tried]
    assert seen == fresh[: len(seen)]
    assert missing <= 0 or seen == fresh


@given(st.integers(1, 40 * GROUP_ELEMENTS), RANKS, st.integers(1, 5))
def test_owners_cover_the_layout_in_whole_tiles(size, ranks, groups):
    layout = Layout.of([("w", (size,), "float32")])

    spans = plan.owners(layout, ranks, groups * GROUP_BYTES + 7)

    assert len(spans) == ranks
    edges = [0, *(span.stop for span in spans)]
    assert [span.start for span in spans] == edges[:-1] and edges[-1] == size
    tiles = [-(-len(span) // (groups * GROUP_ELEMENTS)) for span in spans]
    assert max(tiles) - min(tiles) <= 1
    assert all(s.start % (groups * GROUP_ELEMENTS) == 0 or s.start == size for s in spans)


@pytest.mark.parametrize("work", [partial(plan.assign, {}, 0), partial(plan.assign, {"a": -1}, 1)])
def test_plan_without_ranks_or_of_negative_sizes_is_refused(work):
    with pytest.raises(ConfigError):
        work()


def test_tile_below_a_group_is_refused():
    with pytest.raises(ConfigError, match="tile_bytes=7"):
        plan.owners(Layout.of([("w", (1,), "float32")]), 1, 7)


def test_differing_plan_stops_all_ranks():
    def work(ranks):
        own = plan.plan_hash({"a": 1 + (ranks.rank == 2)}, ranks.size)
        with pytest.raises(ProtocolError, match="different plans") as refused:
            plan.agree(ranks, Turns(1, 0).next("control"), own)
        return str(refused.value)

    assert len(set(fibers(3, "direct", work))) == 1


# Budget

LAYOUT = Layout.of([(f"p{k}", (300_000,), "float32") for k in range(100)])


def budget(memory_bytes: int, peers: int) -> Budget:
    return Budget.of(memory_bytes, peers=peers, ranks=4, layout=LAYOUT, codec=TopK())


@pytest.mark.parametrize("memory_bytes", [64 << 20, 256 << 20])
@pytest.mark.parametrize("peers", [0, 4, 16, 64])
def test_budget_takes_no_more_than_it_is_given(memory_bytes, peers):
    found = budget(memory_bytes, peers)

    needs = found.needs(peers=peers, ranks=4, layout=LAYOUT, codec=TopK())
    assert needs <= memory_bytes
    assert found.tile_bytes % GROUP_BYTES == 0 and found.slots >= 1


@given(st.integers(0, 200))
def test_budget_too_small_is_refused_with_the_number_that_is_enough(peers):
    with pytest.raises(ConfigError) as refused:
        budget(1000, peers)
    needed = int(str(refused.value).rsplit(" ", 1)[1])

    assert budget(needed, peers).slots >= 1
    with pytest.raises(ConfigError, match=f"at least {needed}"):
        budget(needed - 1, peers)


@given(st.integers(0, 100), st.integers(24 << 20, 1 << 30), st.integers(0, 1 << 28))
def test_larger_budget_gives_no_smaller_shares(peers, memory_bytes, more):
    small, large = budget(memory_bytes, peers), budget(memory_bytes + more, peers)

    assert (large.slots, large.tile_bytes) >= (small.slots, small.tile_bytes)


def test_exchange_between_ranks_is_counted_twice():
    """What is sent and what is received are in memory at once; a rank alone sends nothing."""
    shares = Budget(slots=1, piece_bytes=1, tile_bytes=GROUP_BYTES, tiles_per_exchange=8)
    alone, among = (
        shares.needs(peers=64, ranks=ranks, layout=LAYOUT, codec=TopK()) for ranks in (1, 2)
    )
    tiles = 8 * 64 * TopK().encoded_bytes(GROUP_BYTES // 4)

    assert among - alone >= 2 * tiles
