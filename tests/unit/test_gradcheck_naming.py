"""Names of wrong ratios: what fits at all sizes, and nothing where several things do."""

import math
from itertools import combinations

import pytest

from atoll.pools.gradcheck import naming
from atoll.pools.gradcheck.outcome import Size

COUNTS = {"faith": 640, "stoch": 1458, "imp": 243, "ppgd": 251}


def pools(n_ci: int, n_blocks: int, n_per_block: int, n_ppgd: int) -> Size:
    symbols = {"n_ci": n_ci, "n_blocks": n_blocks, "n_per_block": n_per_block, "n_ppgd": n_ppgd}
    label = f"({n_ci}, {n_blocks}x{n_per_block}, {n_ppgd})"
    return Size(label, {**symbols, "n_layers": n_blocks * n_per_block})


FOUR = [pools(4, 2, 2, 2), pools(3, 2, 1, 6), pools(2, 2, 4, 6), pools(4, 3, 2, 1)]
SYMBOLS = ["n_ci", "n_blocks", "n_per_block", "n_ppgd", "n_layers"]
LOOP = [Size("2", {"ranks": 2}), Size("3", {"ranks": 3})]


def value(size: Size, above: tuple[str, ...], below: tuple[str, ...] = ()) -> float:
    top = math.prod(size.symbols[one] for one in above)
    return top / math.prod(size.symbols[one] for one in below)


def named(above: tuple[str, ...], below: tuple[str, ...] = ()) -> str | None:
    """The name at the four sizes of a ratio that was made by this expression."""
    ratios = [value(size, above, below) for size in FOUR]
    return naming.name(ratios, FOUR, counts=[COUNTS] * 4, own="stoch").text


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_each_size_has_a_name_of_its_own_at_the_four_sizes(symbol):
    assert named((symbol,)) == symbol
    assert named((), (symbol,)) == f"1/{symbol}"


# Of n_layers = n_blocks x n_per_block the quotients and the product have shorter names.
SAME = {frozenset(pair) for pair in combinations(("n_blocks", "n_per_block", "n_layers"), 2)}
PAIRS = [pair for pair in combinations(SYMBOLS, 2) if frozenset(pair) not in SAME]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_each_pair_of_sizes_has_a_name_of_its_own_at_the_four_sizes(one, other):
    assert named((one, other)) == f"{one} x {other}"
    assert named((one,), (other,)) == f"{one}/{other}"
    assert named((other,), (one,)) == f"{other}/{one}"
    assert named((), (one, other)) == f"1/({one} x {other})"


def test_shortest_name_is_taken():
    assert named(("n_blocks", "n_per_block")) == "n_layers"
    assert named(("n_layers",), ("n_blocks",)) == "n_per_block"


def test_two_at_one_size_has_several_readings_and_no_name():
    found = naming.name([2.0], FOUR[:1])

    assert found.text is None
    assert found.readings == ("n_blocks", "n_per_block", "n_ppgd", "2")


def test_same_size_twice_is_one_size():
    found = naming.name([4.0, 4.0], [FOUR[0], pools(4, 2, 2, 2)])

    assert found.text is None
    assert "n_ci" in found.readings


def test_even_a_single_reading_at_one_size_is_no_name():
    """The control: at two sizes the same expression has one."""
    sizes = [Size("17", {"ranks": 17}), Size("19", {"ranks": 19})]

    assert naming.name([17.0], sizes[:1]) == naming.Reading(None, ("ranks",))
    assert naming.name([17.0, 19.0], sizes).text == "ranks"


def test_sizes_that_do_not_tell_two_symbols_apart_give_no_name():
    sizes = [pools(2, 3, 2, 1), pools(4, 3, 4, 1)]  # n_ci = n_per_block

    found = naming.name([0.5, 0.25], sizes)

    assert found.text is None
    assert found.readings == ("1/n_ci", "1/n_per_block")


def test_constant_is_told_from_a_size_that_is_the_same_at_some():
    """n_blocks is 2 at three of the four sizes."""
    assert naming.name([2.0] * 4, FOUR).text == "2"
    assert naming.name([2.0] * 3, FOUR[:3]).text is None


@pytest.mark.parametrize(
    ("ratios", "text"),
    [
        ([0.5, 1 / 3], "1/ranks"),
        ([2.0, 3.0], "ranks"),
        ([35.0, 35.0], "count of nll"),
        ([35 / 2, 35 / 3], "count of nll/ranks"),
        ([0.25, 0.25], "1/4"),
        ([2.0, 2.0], "2"),
        ([35 / 24, 35 / 24], "count of nll/count of aux"),
        ([0.378, 0.378], "0.378"),
        ([-0.5, -1 / 3], "-1/ranks"),
    ],
)
def test_ratio_of_a_loop_is_named(ratios, text):
    counts = [{"nll": 35, "aux": 24}] * 2

    assert naming.name(ratios, LOOP, counts=counts, own="nll").text == text


def test_own_count_is_a_likelier_reading_than_the_same_number():
    counts = [{"nll": 12, "aux": 12}] * 2

    assert naming.name([12.0, 12.0], LOOP, counts=counts, own="nll").text == "count of nll"
    assert naming.name([12.0, 12.0], LOOP, counts=counts[:0], own="nll").text == "12"


@pytest.mark.parametrize("ratios", [[0.9314, 0.8722], [0.0, 0.0], [math.nan, 1.0], [0.5, -0.5]])
def test_ratio_that_nothing_fits_has_no_reading(ratios):
    assert naming.name(ratios, LOOP) == naming.Reading(None, ())


def test_ratio_off_by_more_than_the_tolerance_is_another_one():
    assert naming.name([0.5 * (1 + 1e-10), 1 / 3], LOOP).text == "1/ranks"
    assert naming.name([0.5 * (1 + 1e-8), 1 / 3], LOOP).text is None
