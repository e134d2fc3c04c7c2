"""The owners' AdamW against torch's own."""

import pytest
import torch
from torch import Tensor

from atoll.errors import LayoutMismatch
from atoll.strategies.sharded.adamw import AdamW

pytestmark = pytest.mark.usefixtures("one_thread")

RULE = AdamW(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)


def gradients(step: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(1_000, generator=torch.Generator().manual_seed(step), dtype=dtype)


def stepped(dtype: torch.dtype, *, decays: bool, tile: int = 1_000) -> Tensor:
    weights, first, second = gradients(0, dtype), *torch.zeros(2, 1_000, dtype=dtype)
    for step in range(1, 6):
        gradient = gradients(step, dtype)
        for start in range(0, 1_000, tile):
            part = slice(start, start + tile)
            tiles = (weights[part], gradient[part], first[part], second[part])
            RULE.update(tiles, lr=1e-2 * step, step=step, decays=decays)
    return weights


def by_torch(dtype: torch.dtype, *, decay: float) -> Tensor:
    weights = torch.nn.Parameter(gradients(0, dtype))
    made = torch.optim.AdamW([weights], betas=(0.9, 0.95), eps=1e-8, weight_decay=decay)
    for step in range(1, 6):
        made.param_groups[0]["lr"] = 1e-2 * step
        weights.grad = gradients(step, dtype)
        made.step()
    return weights.detach()


@pytest.mark.parametrize("decays", [True, False])
@pytest.mark.parametrize(("dtype", "away"), [(torch.float32, 2e-6), (torch.float64, 1e-14)])
def test_steps_are_those_of_torch(dtype, away, decays):
    wanted = by_torch(dtype, decay=0.1 if decays else 0.0)

    torch.testing.assert_close(stepped(dtype, decays=decays), wanted, rtol=away, atol=away)


def test_decay_shows():
    """The control of the test above."""
    a, b = stepped(torch.float64, decays=True), stepped(torch.float64, decays=False)

    assert (a - b).abs().max() > 1e-3


@pytest.mark.parametrize("tile", [1, 7, 64])
def test_tiles_of_any_size_give_the_same_bits(tile):
    whole = stepped(torch.float32, decays=True)

    assert torch.equal(stepped(torch.float32, decays=True, tile=tile), whole)


def test_tiles_that_differ_are_refused_before_anything_is_written():
    weights = torch.ones(4)

    with pytest.raises(LayoutMismatch, match="must be alike"):
        RULE.update((weights, torch.ones(3), *torch.zeros(2, 4)), lr=1.0, step=1, decays=True)

    assert torch.equal(weights, torch.ones(4))
