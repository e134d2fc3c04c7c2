import dataclasses
from functools import reduce
from operator import add

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.errors import EmptySum, ProtocolError
from atoll.sums.fold import fold_tile
from atoll.sums.partial import PartialSum

EPS = float(torch.finfo(torch.float32).eps)

# No deadline and no health check of speed: a busy machine must not fail a claim about values.
quick = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)

seeds = st.integers(0, 2**32)
counts = st.lists(st.integers(0, 2**40), min_size=1, max_size=12)
# A weight of 1 takes its own way through the fold, so it must come often.
weights = st.lists(st.just(1) | st.integers(0, 50), min_size=1, max_size=8)


def values(key: int, size: int = 64) -> Tensor:
    """Random integers times random powers of two, out of the raw words of Philox."""
    words = np.random.Philox(key=key).random_raw(size)
    mantissas = (words >> np.uint64(40)).astype(np.float64) - 2**23
    exponents = (words % np.uint64(12)).astype(np.int32) - 32
    return torch.from_numpy(np.ldexp(mantissas, exponents).astype(np.float32))


def parts_of(seed: int, numbers: list[int], size: int = 64) -> list[tuple[str, PartialSum]]:
    return [
        (f"island-{i}", PartialSum(values(seed + i, size), count, "tokens"))
        for i, count in enumerate(numbers)
    ]


def bits(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def regroup(parts: list[PartialSum], seed: int) -> PartialSum:
    """The sum of `parts` over a random binary tree."""
    rng = np.random.Generator(np.random.Philox(key=seed))
    trees = list(parts)
    while len(trees) > 1:
        left = trees.pop(int(rng.integers(len(trees))))
        right = trees.pop(int(rng.integers(len(trees))))
        trees.append(left + right)
    return trees[0]


# --- PartialSum ---


def test_sum_adds_totals_and_counts():
    left = PartialSum(torch.tensor([1.0, 2.0]), 3, "tokens")
    right = PartialSum(torch.tensor([10.0, 20.0]), 4, "tokens")

    both = left + right

    assert (both.total.tolist(), both.count, both.unit) == ([11.0, 22.0], 7, "tokens")


def test_sum_leaves_its_terms_as_they_were():
    left = PartialSum(torch.tensor([1.0]), 1, "rows")
    right = PartialSum(torch.tensor([2.0]), 1, "rows")

    (left + right).total.fill_(9.0)

    assert (left.total.item(), right.total.item()) == (1.0, 2.0)


def test_sum_refuses_another_unit_and_names_both():
    left = PartialSum(torch.zeros(1), 1, "tokens")

    with pytest.raises(ProtocolError, match=r"'tokens'.*'rows'"):
        left + PartialSum(torch.zeros(1), 1, "rows")


@pytest.mark.parametrize(
    "other",
    [torch.zeros(1), torch.zeros(1, 3), torch.zeros(3).double()],
    ids=["broadcast", "rank", "dtype"],
)
def test_sum_refuses_a_total_that_is_not_alike(other):
    left = PartialSum(torch.zeros(3), 1, "tokens")

    with pytest.raises(ProtocolError, match="must be alike"):
        left + PartialSum(other, 1, "tokens")


@pytest.mark.parametrize("count", [-1, 1.0, "1", True, None])
def test_sum_refuses_what_was_not_counted(count):
    with pytest.raises(ProtocolError, match=f"count={count!r} must be an integer of at least 0"):
        PartialSum(torch.zeros(1), count, "tokens")


def test_sum_cannot_be_changed():
    part = PartialSum(torch.zeros(1), 1, "tokens")

    with pytest.raises(dataclasses.FrozenInstanceError):
        part.count = 2  # type: ignore[misc]  # the point of the test


@quick
@given(seeds, st.integers(1, 2**24))
def test_mean_divides_once(seed, count):
    total = values(seed)

    mean = PartialSum(total, count, "tokens").mean()

    assert bits(mean) == (total.numpy() / np.float32(count)).tobytes()


def test_mean_refuses_an_empty_sum():
    with pytest.raises(EmptySum, match="no tokens arrived"):
        PartialSum(torch.zeros(2), 0, "tokens").mean()


def test_mean_leaves_the_total_as_it_was():
    part = PartialSum(torch.tensor([4.0]), 1, "rows")

    part.mean().fill_(9.0)

    assert part.total.item() == 4.0


# --- sums of sums ---


@quick
@given(seeds, counts, seeds)
def test_regrouped_sum_agrees_within_n_eps(seed, numbers, tree_seed):
    # Each tree of n terms errs by at most (n-1)*eps/2 * sum|x| to first order, so two of them
    # differ by at most (n-1)*eps * sum|x|; the n-th eps covers the higher orders.
    keyed = parts_of(seed, numbers)
    parts = [part for _, part in keyed]
    bound = len(parts) * EPS * torch.stack([p.total.double().abs() for p in parts]).sum(0)

    difference = regroup(parts, tree_seed).total.double() - reduce(add, parts).total.double()

    assert bool((difference.abs() <= bound).all())


@quick
@given(seeds, counts, seeds)
def test_regrouped_count_is_equal(seed, numbers, tree_seed):
    parts = [part for _, part in parts_of(seed, numbers, size=1)]

    assert regroup(parts, tree_seed).count == sum(numbers)


# --- fold_tile ---


@quick
@given(seeds, weights)
def test_tile_fold_is_one_multiply_and_one_add_per_term(seed, numbers):
    deltas = [values(seed + i) for i in range(len(numbers))]
    scaled = [d.numpy() * np.float32(w) for d, w in zip(deltas, numbers, strict=True)]
    expected = reduce(np.add, scaled)

    total = fold_tile(zip(deltas, numbers, strict=True), unit="tokens").total

    assert bits(total) == expected.tobytes()


@quick
@given(seeds, weights)
def test_tile_fold_equals_the_sum_of_the_scaled_terms(seed, numbers):
    deltas = [values(seed + i) for i in range(len(numbers))]
    parts = [
        PartialSum(delta * float(weight), weight, "tokens")
        for delta, weight in zip(deltas, numbers, strict=True)
    ]

    tile = fold_tile(zip(deltas, numbers, strict=True), unit="tokens")

    expected = reduce(add, parts)
    assert (bits(tile.total), tile.count) == (bits(expected.total), expected.count)


def test_tile_fold_in_another_order_gives_other_bits():
    deltas = [values(i, 4096) for i in range(6)]

    found = [fold_tile(((d, 1) for d in each), unit="rows") for each in (deltas, deltas[::-1])]

    assert bits(found[0].total) != bits(found[1].total)


@quick
@given(seeds, weights, st.lists(st.integers(1, 256), max_size=6))
def test_tile_fold_gives_the_same_bits_for_any_tile_size(seed, numbers, cuts):
    deltas = [values(seed + i, 257) for i in range(len(numbers))]
    whole = fold_tile(zip(deltas, numbers, strict=True), unit="tokens").total
    sizes = np.diff([0, *sorted(set(cuts)), 257]).tolist()

    pieces = zip(*(delta.split(sizes) for delta in deltas), strict=True)
    tiles = [fold_tile(zip(p, numbers, strict=True), unit="tokens").total for p in pieces]

    assert bits(torch.cat(tiles)) == bits(whole)


@pytest.fixture
def restore_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("numbers", [[1, 1, 1], [7, 1, 3], [2, 2, 2, 2]])
@pytest.mark.usefixtures("restore_threads")
def test_tile_fold_gives_the_same_bits_for_any_thread_count(numbers):
    # Torch splits a kernel over threads from 32,768 elements on.
    deltas = [values(i, 100_003) for i in range(len(numbers))]
    torch.set_num_threads(1)
    alone = fold_tile(zip(deltas, numbers, strict=True), unit="tokens").total

    torch.set_num_threads(2)
    together = fold_tile(zip(deltas, numbers, strict=True), unit="tokens").total

    assert bits(together) == bits(alone)


@pytest.mark.parametrize("numbers", [[1], [1, 1], [1, 7], [7], [7, 1], [1, 1, 1], [7, 2, 3]])
def test_tile_fold_leaves_its_terms_as_they_were(numbers):
    deltas = [values(i) for i in range(len(numbers))]
    before = [bits(delta) for delta in deltas]

    fold_tile(zip(deltas, numbers, strict=True), unit="tokens").total.fill_(9.0)

    assert [bits(delta) for delta in deltas] == before


@quick
@given(seeds, weights)
def test_tile_fold_takes_terms_one_at_a_time_into_a_reused_buffer(seed, numbers):
    deltas = [values(seed + i) for i in range(len(numbers))]
    expected = fold_tile(zip(deltas, numbers, strict=True), unit="tokens").total
    buffer = torch.empty(64)

    decoded = (delta if i == 0 else buffer.copy_(delta) for i, delta in enumerate(deltas))

    assert bits(fold_tile(zip(decoded, numbers, strict=True), unit="tokens").total) == bits(
        expected
    )


def test_tile_fold_keeps_the_sign_of_zero_of_a_lone_term():
    total = fold_tile([(torch.tensor([-0.0]), 1)], unit="tokens").total

    assert bits(total) == bits(torch.tensor([-0.0]))


def test_tile_fold_sums_weights_as_its_count():
    terms = [(torch.zeros(1), 2**40), (torch.zeros(1), 1), (torch.zeros(1), 0)]

    tile = fold_tile(terms, unit="tokens")

    assert (tile.count, tile.unit) == (2**40 + 1, "tokens")


@pytest.mark.parametrize("weight", [-1, 0.5, True])
def test_tile_fold_refuses_a_weight_that_is_no_count(weight):
    with pytest.raises(ProtocolError, match=f"weight={weight!r} must be an integer"):
        fold_tile([(torch.zeros(1), weight)], unit="tokens")


@pytest.mark.parametrize("first_weight", [1, 2])
def test_tile_fold_refuses_a_term_of_another_shape(first_weight):
    terms = [(torch.zeros(3), first_weight), (torch.zeros(1), 1)]

    with pytest.raises(ProtocolError, match=r"\(1,\).*\(3,\)"):
        fold_tile(terms, unit="tokens")


def test_tile_fold_refuses_a_term_of_another_dtype():
    with pytest.raises(ProtocolError, match=r"torch\.bfloat16"):
        fold_tile([(torch.zeros(3, dtype=torch.bfloat16), 1)], unit="tokens")


def test_tile_fold_refuses_to_sum_nothing():
    with pytest.raises(EmptySum):
        fold_tile([], unit="tokens")
