"""A known gradient through FSDP2's own hooks: unsharding, the reduce-scatter, the shards.

Loaded only for a model that `fully_shard` or `replicate` was applied to.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from atoll.errors import ConfigError
from atoll.pools.adapters import fsdp2, known

_ABSENT = object()

T = TypeVar("T")


def through(model: nn.Module, value: float) -> None:
    """Leaves in `.grad` what FSDP2 makes of `value` on this rank."""
    sharded = [module for _, module in fsdp2.modules(model)]
    seen: list[object] = []  # what several places share is sent once
    with ExitStack() as stack:
        for module in sharded:
            stack.enter_context(_standing_in(module, partial(_sent, module, value, seen)))
        try:
            for root in _outermost(model):
                cast(Tensor, cast(Any, root)()).backward()  # type: ignore[no-untyped-call]
        except BaseException:
            for root in _outermost(model):
                # What it was doing is given up; the model can be used again.
                root.reset_iter_state()
            raise


def owners(model: nn.Module) -> dict[str, str]:
    """The name of the FSDP module that reduces each parameter."""
    found: dict[str, str] = {}
    for name, module in fsdp2.modules(model):
        for path, _ in cast(nn.Module, module).named_parameters(prefix=name):
            found[path] = name  # modules come before those within them
    return found


def reduce_dtype(model: nn.Module) -> torch.dtype | None:
    """The narrowest type that gradients are reduced in, where mixed precision names one."""
    policies = [m._get_fsdp_state()._mp_policy for _, m in fsdp2.modules(model)]
    named = [p.reduce_dtype or p.param_dtype for p in policies]
    return max((d for d in named if d), key=lambda d: torch.finfo(d).eps, default=None)


def _sent(module: FSDPModule, value: float, seen: list[object]) -> Tensor:
    """The loss of a module's own parameters, and of the FSDP modules within it."""
    own = _unseen(_own(cast(nn.Module, module)), seen)
    within = _unseen(_within(cast(nn.Module, module)), seen)
    if any(isinstance(parameter, DTensor) for parameter in own):
        raise ConfigError(
            "the model is sharded within layers (tensor parallel) too, where ranks of one layer "
            "share their rows; gradients are summed between ranks of different rows only"
        )
    parts = [known.loss(own, value)] if any(p.requires_grad for p in own) else []
    parts += [cast(Tensor, cast(Any, inner)()) for inner in within]
    return torch.stack([torch.zeros(()), *(part.to("cpu", torch.float32) for part in parts)]).sum()


def _unseen(found: Iterator[T], seen: list[object]) -> list[T]:
    new = []
    for one in found:
        if not any(one is other for other in seen):
            seen.append(one)
            new.append(one)
    return new


def _own(module: nn.Module) -> Iterator[nn.Parameter]:
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _own(child)


def _within(module: nn.Module) -> Iterator[FSDPModule]:
    for child in module.children():
        if isinstance(child, FSDPModule):
            yield child
        else:
            yield from _within(child)


def _outermost(model: nn.Module) -> list[FSDPModule]:
    return [model] if isinstance(model, FSDPModule) else list(_within(model))


@contextmanager
def _standing_in(module: FSDPModule, forward: Callable[[], Tensor]) -> Iterator[None]:
    """The module's forward function is `forward`, and of its hooks only torch's own are awake."""
    attributes = vars(module)
    hooks = {k: attributes[k] for k in ("_forward_pre_hooks", "_forward_hooks")}
    changed = {
        "forward": forward,
        "_compiled_call_impl": None,
        "_backward_hooks": type(attributes["_backward_hooks"])(),
        "_backward_pre_hooks": type(attributes["_backward_pre_hooks"])(),
        **{k: type(v)((n, h) for n, h in v.items() if _is_torchs(h)) for k, v in hooks.items()},
    }
    before = {name: attributes.get(name, _ABSENT) for name in changed}
    attributes.update(changed)
    try:
        yield
    finally:
        for name, kept in before.items():
            attributes.pop(name) if kept is _ABSENT else attributes.update({name: kept})


def _is_torchs(hook: Callable[..., Any]) -> bool:
    return getattr(hook, "__module__", "").startswith("torch.distributed.")
