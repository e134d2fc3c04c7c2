"""When a unit's weights are needed and when its gradient is whole: hooks around its module.

As FSDP2 does it: before forward the inputs pass through an identity whose backward is the end of
the unit's backward pass, and after forward the outputs get hooks that begin it. Nothing here knows
what is done at these four moments.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as tree  # of torch itself: what a module takes and returns is any
from torch.utils.hooks import RemovableHandle


class Moments(Protocol):
    """What is done around a unit's passes. A call is one forward pass of it, kept until its end."""

    def before_forward(self, unit: int) -> "Call | None":
        """The weights must be there; None when the pass is no training pass of its own."""
        ...

    def after_forward(self, unit: int, call: "Call | None") -> None:
        """The weights may go."""
        ...

    def before_backward(self, call: "Call") -> None:
        """The weights must be there again; told for each output that the loss depends on."""
        ...

    def after_backward(self, call: "Call") -> None:
        """All gradients of the call have been computed; not told where no input has one."""
        ...


class Call:
    """One forward pass of a unit whose backward is still to come."""

    def __init__(self, unit: int) -> None:
        self.unit = unit
        self.began_backward = False  # its first output has a gradient


class _End(torch.autograd.Function):
    """The identity, whose backward runs after that of everything behind it."""

    @staticmethod
    def forward(ctx: Any, moments: Moments, call: Call, *inputs: Tensor) -> Any:
        ctx.moments, ctx.call = moments, call
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.moments.after_backward(ctx.call)
        return (None, None, *gradients)


def attach(module: nn.Module, unit: int, moments: Moments) -> list[RemovableHandle]:
    """Tells `moments` of every pass of the module; the handles take the hooks off again."""
    current: list[Call | None] = [None]  # a pass that raised leaves its call behind

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        call = current[0] = moments.before_forward(unit)
        return None if call is None else _with_end(moments, call, args, kwargs)

    def after(_: nn.Module, __: Any, output: Any) -> None:
        call, current[0] = current[0], None
        if call is not None:
            for tensor in _with_gradients(output):
                tensor.register_hook(lambda _: moments.before_backward(call))
        moments.after_forward(unit, call)

    return [
        module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
        module.register_forward_hook(after),
    ]


def _with_end(moments: Moments, call: Call, args: Any, kwargs: Any) -> Any:
    leaves, spec = tree.tree_flatten((args, kwargs))
    places = [k for k, leaf in enumerate(leaves) if _has_gradient(leaf)]
    if not places:
        return None
    identity: Any = _End.apply  # torch leaves it untyped
    passed = identity(moments, call, *(leaves[k] for k in places))
    for place, tensor in zip(places, passed, strict=True):
        leaves[place] = tensor
    return tree.tree_unflatten(leaves, spec)


def _with_gradients(output: Any) -> Iterator[Any]:
    return (leaf for leaf in tree.tree_flatten(output)[0] if _has_gradient(leaf))


def _has_gradient(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad
