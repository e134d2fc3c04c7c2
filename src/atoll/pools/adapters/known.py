"""A known gradient, sent through a wrapped model's own backward pass, and no trace of it after.

The model's forward function is never called: a stand-in takes its place, so that neither inputs
nor activations are needed. Hooks of the user's own, on modules and parameters, sleep meanwhile.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class _Known(torch.autograd.Function):
    """Zero, whose gradient is `value` at every element of a parameter, whatever it holds."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, value: float) -> Tensor:
        ctx.made = (parameter.shape, parameter.dtype, parameter.device, value)
        return parameter.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        shape, dtype, device, value = ctx.made
        return torch.full(shape, value, dtype=dtype, device=device), None


def loss(parameters: Iterable[Tensor], value: float) -> Tensor:
    """A loss whose gradient is `value` everywhere, the last parameter's first."""
    parts = [_Known.apply(p, value) for p in parameters if p.requires_grad]  # type: ignore[no-untyped-call]
    return torch.stack(parts).sum()


def through_ddp(model: DistributedDataParallel, value: float) -> None:
    """Leaves in `.grad` what DDP makes of `value` on this rank."""
    wrapped, shared = model.module, model.require_forward_param_sync
    # Buffers are not shared: that would change those of other ranks.
    model.require_forward_param_sync = False
    model._modules["module"] = _Stand(wrapped, value)
    try:
        # Not by calling the model: its hooks are the user's.
        start = torch.zeros((), device=next(wrapped.parameters()).device)
        model.forward(start).backward()  # type: ignore[no-untyped-call]
    finally:
        model._modules["module"] = wrapped
        model.require_forward_param_sync = shared
        if not model._has_rebuilt_buckets:
            # Else DDP would fill its buckets in the order of the known gradients ever after.
            model.reducer._reset_state()


class _Stand(nn.Module):
    """Stands in for the wrapped module of a DDP model."""

    def __init__(self, wrapped: nn.Module, value: float) -> None:
        super().__init__()
        self._parameters_of = wrapped.parameters  # not the module itself: it is no part of this
        self._value = value

    def forward(self, _: Tensor) -> Tensor:
        return loss(self._parameters_of(), self._value)


@contextmanager
def without_trace(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Gradients are gone and hooks asleep within; afterwards both are as before."""
    # Copies: DDP's gradients may be views of its buckets, which the known gradient goes through.
    before = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in parameters]
    dicts = [getattr(p, name, None) for p in parameters for name in _HOOKS]
    hooks = [(hooks, dict(hooks)) for hooks in dicts if hooks]
    for asleep, _ in hooks:
        asleep.clear()  # in place: autograd holds these very dicts
    for parameter in parameters:
        parameter.grad = None
    try:
        with torch.enable_grad():
            yield
    finally:
        for parameter, gradient, values in before:
            parameter.grad = gradient
            if gradient is not None and values is not None:
                gradient.copy_(values)
        for asleep, kept in hooks:
            asleep.update(kept)
