"""What an adapter is: a wrapped model whose backward pass sums gradients between ranks."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Scale = Callable[[Tensor], None]


def unscaled(_: Tensor) -> None:
    """Gradients are partial sums already: each divided by the honest global count alone."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A model that is wrapped in DDP, or had `fully_shard` or `replicate` applied to it.

    `scale` changes this rank's gradient in place on its way into the sum.
    """

    model: nn.Module
    scale: Scale = unscaled


def unwrapped(model: nn.Module) -> nn.Module:
    """The module whose parameter names are those of the model itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def is_fsdp2(model: nn.Module) -> bool:
    """Whether `fully_shard` or `replicate` was applied to the model."""
    # Not by the type: loading FSDP2 takes most of a second, and few models need it.
    return any(hasattr(parameter, "device_mesh") for parameter in model.parameters())
