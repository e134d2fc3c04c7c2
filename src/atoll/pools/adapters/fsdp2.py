"""FSDP2 and `replicate` as a SUM: divide factor 1 and forced SUM, on every one of their modules.

Loaded only for a model they were applied to: importing FSDP2 takes most of a second. The two
setters belong together, and neither recurses (torch 2.13, gloo): the factor alone raises in fp32
and bf16 and is right in float64, forced SUM alone is a mean, and a module that is left out keeps
its mean.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from atoll.errors import ConfigError
from atoll.pools.adapters.base import Adapter, Scale, unscaled


def sum_gradients(model: nn.Module, scale: Scale = unscaled) -> Adapter:
    """From now on the backward pass of `model` leaves the sum of the ranks' scaled gradients."""
    for name, parameter in model.named_parameters():
        _check_reduced(name, parameter, is_scaled=scale is not unscaled)
    for _, module in modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if scale is not unscaled:
            # The base class is not public; two methods are asked of it.
            module.set_custom_reduce_scatter(cast(Any, _ReduceScatter(scale)))
    return Adapter(model, scale)


def modules(model: nn.Module) -> Iterator[tuple[str, FSDPModule]]:
    """Every module that `fully_shard` or `replicate` was applied to, by name; the root is ''."""
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            yield name, module


def _check_reduced(name: str, parameter: Tensor, *, is_scaled: bool) -> None:
    if not isinstance(parameter, DTensor):
        raise ConfigError(
            f"parameter {name!r} is outside what fully_shard was applied to, so its gradient "
            f"would stay on one rank; apply fully_shard to the whole model too"
        )
    mesh = parameter.device_mesh
    parts = [mesh.size(dim) for dim, p in enumerate(parameter.placements) if isinstance(p, Shard)]
    if is_scaled and mesh.size() > 1 and max(parts, default=1) == 1:
        # foreach_reduce calls the reduce-scatter, where scaling is done, for shards alone.
        raise ConfigError(
            f"parameter {name!r} is a copy on each of {mesh.size()} ranks, and replicate has no "
            f"place before its sum where a rank's gradient could be weighed by its rows; use "
            f"DistributedDataParallel or fully_shard"
        )


class _ReduceScatter:
    """FSDP2's reduce-scatter of scaled gradients."""

    def __init__(self, scale: Scale) -> None:
        self._scale = scale

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for FSDP2's own buffers."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Sums every rank's part into the shard of each."""
        self._scale(input_tensor)
        return dist.reduce_scatter_single(
            output=output_tensor, input=input_tensor, group=group, op=op, async_op=async_op
        )
