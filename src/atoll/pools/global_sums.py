"""The SUM over a group inside of a loss that is not linear in it, with each rank's own gradient.

Every rank evaluates the same f at the same S = sum of all parts, so f'(S) times the derivative of
its own part is that rank's share of the chain rule, and the shares add up to the whole gradient:

    S = local + (sum - local).detach()

An all-reduce that autograd goes through adds the upstream gradients of all n ranks, which are all
alike: n times too much.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from atoll.collectives.base import Collectives, Key
from atoll.errors import ConfigError


def global_sum(x: Tensor, group: Collectives, key: Key) -> Tensor:
    """The SUM of all ranks' `x`, the same bits on all of them; its gradient goes to the own `x`.

    All ranks of the group call it, with one shape and dtype on the CPU; it waits for them. To be
    used where every rank puts the result into the same function: a result that ranks weigh
    differently has another gradient. ConfigError in a backward pass with `create_graph`, since the
    second derivative between ranks is not part of it.
    """
    return _GlobalSum.apply(x, group, key)  # type: ignore[no-any-return, no-untyped-call]  # torch


class _GlobalSum(torch.autograd.Function):
    """The identity above, written so that S is what arrived and not computed on each rank."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: Collectives, key: Key) -> Tensor:
        del ctx
        # Copied: the sum is made in place, and x is the caller's.
        total = x.detach().clone(memory_format=torch.contiguous_format)
        group.all_reduce(key, total.view(-1)).wait()
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, *upstream: Tensor) -> tuple[Tensor, None, None]:
        del ctx
        if torch.is_grad_enabled():
            raise ConfigError(
                "global_sum is differentiated with create_graph=True; what other ranks have of a "
                "second derivative does not come back through it, so take first derivatives only"
            )
        return upstream[0], None, None
