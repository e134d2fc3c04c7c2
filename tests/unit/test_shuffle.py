import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.data import shuffle
from atoll.data.shuffle import Permutation
from atoll.errors import ConfigError

LENGTHS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 63, 64, 65, 97, 255, 256, 257, 1009, 4095, 4097]


@pytest.mark.parametrize("length", LENGTHS)
def test_permutation_is_a_bijection(length):
    permutation = Permutation(length, b"key")

    rows = permutation.rows(np.arange(length))

    assert sorted(rows.tolist()) == list(range(length))


@given(length=st.integers(1, 3000), key=st.binary())
def test_permutation_is_a_bijection_for_any_length_and_key(length, key):
    permutation = Permutation(length, key)

    rows = permutation.rows(np.arange(length))

    assert np.array_equal(np.sort(rows), np.arange(length))


@given(length=st.integers(1, 2**62), data=st.data())
def test_one_position_goes_where_the_vectorised_call_sends_it(length, data):
    position = data.draw(st.integers(0, length - 1))
    permutation = Permutation(length, b"key")

    (row,) = permutation.rows(np.array([position]))

    assert row == permutation.rows(np.array([position, 0]))[0]
    assert 0 <= row < length


def test_permutation_gives_its_golden_values():
    permutation = Permutation(1000, b"atoll")

    rows = permutation.rows(np.arange(8))

    assert rows.tolist() == GOLDEN_FEW


def test_permutation_of_many_rows_gives_its_golden_values():
    permutation = Permutation(10**12, b"int 7")

    rows = permutation.rows(np.arange(4))

    assert rows.tolist() == GOLDEN_MANY


def test_permutation_leaves_few_rows_in_place():
    permutation = Permutation(10_000, b"key")

    fixed = int((permutation.rows(np.arange(10_000)) == np.arange(10_000)).sum())

    # A random permutation has one fixed point on average; P(more than 8) is below 1e-6.
    assert fixed <= 8


def test_permutation_spreads_neighbours_over_the_whole_length():
    permutation = Permutation(10_000, b"key")

    rows = permutation.rows(np.arange(2_000))

    # 200 are expected in each tenth, standard deviation 13; six of them on both sides.
    assert np.all(np.abs(np.histogram(rows, bins=10, range=(0, 10_000))[0] - 200) < 80)


@pytest.mark.parametrize("position", [-1, 5])
def test_permutation_refuses_a_position_outside_it(position):
    permutation = Permutation(5, b"key")

    with pytest.raises(IndexError, match="0 to 4"):
        permutation.rows(np.array([position]))


@pytest.mark.parametrize("length", [0, -1, 2**62 + 1])
def test_permutation_refuses_a_length_it_cannot_hold(length):
    with pytest.raises(ConfigError, match="rows"):
        Permutation(length, b"key")


def test_every_epoch_holds_every_row_once():
    rows = shuffle.rows_at(np.arange(3 * 97), rows=97, seed=1).reshape(3, 97)

    assert np.array_equal(np.sort(rows, axis=1), np.tile(np.arange(97), (3, 1)))


def test_epochs_differ_from_each_other():
    first, second = shuffle.rows_at(np.arange(2 * 97), rows=97, seed=1).reshape(2, 97)

    assert not np.array_equal(first, second)


def test_seeds_give_different_orders():
    one = shuffle.rows_at(np.arange(97), rows=97, seed=1)
    other = shuffle.rows_at(np.arange(97), rows=97, seed=2)

    assert not np.array_equal(one, other)


def test_rows_of_several_epochs_are_the_golden_ones():
    found = shuffle.rows_at(np.array([0, 1, 999, 1000, 123_456]), rows=1000, seed=3)

    assert found.tolist() == GOLDEN_EPOCHS


GOLDEN_FEW: list[int] = [984, 8, 410, 214, 658, 378, 867, 626]
GOLDEN_MANY: list[int] = [449751555635, 788784978091, 538937190626, 196420250432]
GOLDEN_EPOCHS: list[int] = [726, 162, 971, 545, 614]
