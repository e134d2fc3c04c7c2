"""What every rank of a group has alike, such as a loss of weights, enters a SUM once.

The first rank of the group contributes it, the others zeros: no number changes with their count.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from atoll.collectives.base import Collectives


@dataclass(frozen=True, slots=True)
class Contribution:
    """One rank's part in what all have: all of it, or zeros."""

    is_first: bool

    def __call__(self, value: Tensor) -> Tensor:
        """`value` on every rank; its gradient on the first, zeros of the same shape on the others.

        For a loss with other terms in it: the backward pass takes the same way on all ranks, so
        hooks of gradients fire on all.
        """
        if self.is_first:
            return value
        return _Silent.apply(value)  # type: ignore[no-any-return, no-untyped-call]  # torch

    def backward(self, loss: Tensor, parameters: Iterable[Tensor]) -> None:
        """The backward pass on the first rank alone; gradients are there on all, zeros at least.

        Cheaper than a gradient of zeros, where no hooks wait for one. Buckets of gradients have the
        same members on all ranks afterwards.
        """
        if self.is_first:
            loss.backward()  # type: ignore[no-untyped-call]  # torch
        for parameter in parameters:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def contribute_once(group: Collectives) -> Contribution:
    """This rank's part in what every rank of the group has alike."""
    return Contribution(is_first=group.rank == 0)


class _Silent(torch.autograd.Function):
    """The identity, with a gradient of zeros."""

    @staticmethod
    def forward(ctx: FunctionCtx, value: Tensor) -> Tensor:
        del ctx
        return value.view_as(value)

    @staticmethod
    def backward(ctx: FunctionCtx, *upstream: Tensor) -> Tensor:
        del ctx
        return torch.zeros_like(upstream[0])
