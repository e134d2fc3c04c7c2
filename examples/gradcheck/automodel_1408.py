"""NVIDIA-NeMo/Automodel #1408: the auxiliary loss never reaches the router.

It rides on the router's logits by an autograd function, whose result is thrown away: the loss is
computed and logged, and has no gradient.
"""

from typing import Any

import torch
from torch import Tensor

from atoll.pools.counted import Counted
from atoll.pools.loop import Loop
from examples.gradcheck import sample

loop = Loop(rows=12, ranks=(2, 3))
loop.model(sample.Routed)
loop.rows(sample.batch)


@loop.term()
def nll(model: sample.Routed, rows: sample.Rows) -> Counted:
    return Counted(*sample.nll(model, rows), "tokens")


@loop.term(coeff=0.1)
def auxiliary(model: sample.Routed, rows: sample.Rows) -> Counted:
    model(rows[0])
    squares = model.logits.logsumexp(-1).square()
    return Counted(squares.sum(), squares.numel(), "positions")


class Riding(torch.autograd.Function):
    """`carrier` as it is; on the way back `loss` gets the gradient of one that was added."""

    @staticmethod
    def forward(_: Any, carrier: Tensor, __: Tensor) -> Tensor:
        return carrier.view_as(carrier)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.ones(())


@loop.step
def step(model: sample.Routed, rows: sample.Rows, coeffs: dict[str, float]) -> None:
    total, count = sample.nll(model, rows)
    squares = model.logits.logsumexp(-1).square()
    extra = coeffs["auxiliary"] * squares.sum() / sample.over_ranks(squares.numel())
    loss = coeffs["nll"] * total / sample.over_ranks(count)
    Riding.apply(loss, extra)
    loss.backward()
    sample.sum_over_ranks(model)
