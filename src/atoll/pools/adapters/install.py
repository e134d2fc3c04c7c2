"""The adapter that a model's way of data parallelism needs."""

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from atoll.errors import ConfigError
from atoll.pools.adapters import ddp
from atoll.pools.adapters.base import Adapter, Scale, is_fsdp2, unscaled


def sum_gradients(model: nn.Module, scale: Scale = unscaled) -> Adapter:
    """From now on the backward pass of a wrapped `model` leaves the sum of scaled gradients."""
    if isinstance(model, DistributedDataParallel):
        return ddp.sum_gradients(model, scale)
    if is_fsdp2(model):
        from atoll.pools.adapters import fsdp2

        return fsdp2.sum_gradients(model, scale)
    raise ConfigError(
        "the model is neither wrapped in DistributedDataParallel nor had fully_shard applied to "
        "it, so no gradient of it crosses ranks; do one of both first"
    )
