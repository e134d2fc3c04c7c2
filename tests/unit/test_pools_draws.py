"""Noise of a topology: by function, item, call and global row, and by nothing else."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from atoll.pools.draws import Draw
from atoll.pools.gradcheck.loading import default_dtype

ROWS = torch.arange(8)
KINDS: dict[str, Callable[[Draw], Tensor]] = {
    "uniform": lambda draw: draw.uniform(3, 2),
    "normal": lambda draw: draw.normal(3, 2),
}


def draw(name: str = "f", item: str | None = "a", seed: int = 7, index: Tensor = ROWS) -> Draw:
    return Draw(seed=seed, name=name, item=item, index=index)


@pytest.mark.parametrize("kind", KINDS)
def test_draws_do_not_depend_on_the_division_of_the_rows(kind: str) -> None:
    whole = KINDS[kind](draw())

    parts = [KINDS[kind](draw(index=part)) for part in (ROWS[:3], ROWS[3:4], ROWS[4:])]

    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(KINDS[kind](draw(index=ROWS.flip(0))), whole.flip(0))


@pytest.mark.parametrize("kind", KINDS)
def test_draws_are_the_same_numbers_in_both_dtypes(kind: str) -> None:
    with default_dtype(torch.float32):
        single = KINDS[kind](draw())
    with default_dtype(torch.float64):
        double = KINDS[kind](draw())

    assert (single.dtype, double.dtype) == (torch.float32, torch.float64)
    assert torch.equal(single.double(), double)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "other",
    [
        draw(name="g"),
        draw(item="b"),
        draw(item=None),
        draw(seed=8),
        draw(index=ROWS + 8),
    ],
    ids=["function", "item", "no item", "seed", "rows"],
)
def test_draws_differ_by_who_draws_and_for_which_row(kind: str, other: Draw) -> None:
    assert not (KINDS[kind](draw()) == KINDS[kind](other)).any()


@pytest.mark.parametrize("kind", KINDS)
def test_draws_differ_by_call_and_row(kind: str) -> None:
    one = draw()

    first, second = KINDS[kind](one), KINDS[kind](one)

    assert not (first == second).any()
    assert len(first.flatten().unique()) == first.numel()


def test_draws_have_their_moments() -> None:
    many = torch.arange(2_000)

    uniform, normal = draw(index=many).uniform(5).double(), draw(index=many).normal(5).double()

    assert uniform.min() >= 0 and uniform.max() < 1
    # Of 10,000 draws a mean is off by 0.01 deviations; four of these are allowed.
    assert abs(uniform.mean() - 0.5) < 0.04 * 12**-0.5
    assert abs(normal.mean()) < 0.04
    assert abs(normal.square().mean() - 1) < 0.04 * 2**0.5
    assert abs(normal.pow(4).mean() - 3) < 0.04 * 96**0.5


def test_draw_of_no_rows_is_empty() -> None:
    assert draw(index=ROWS[:0]).normal(3).shape == (0, 3)
    assert draw().uniform().shape == (8,)
