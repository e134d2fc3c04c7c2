"""DDP as a SUM: a communication hook in the place of its division by the number of ranks."""

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from atoll.errors import ConfigError
from atoll.pools.adapters.base import Adapter, Scale, unscaled


def sum_gradients(model: DistributedDataParallel, scale: Scale = unscaled) -> Adapter:
    """From now on the backward pass of `model` leaves the sum of the ranks' scaled gradients."""
    try:
        model.register_comm_hook((scale, model.process_group), sum_hook)
    except RuntimeError as exc:
        raise ConfigError(
            "the DDP model has a communication hook of its own, which stands where gradients are "
            "made sums; leave the model without"
        ) from exc
    return Adapter(model, scale)


def sum_hook(
    state: tuple[Scale, dist.ProcessGroup],
    bucket: dist.GradBucket,  # type: ignore[name-defined] # torch checks for this very name
) -> torch.futures.Future[Tensor]:
    """The bucket's sum over ranks; DDP's own hook divides by their number first."""
    scale, group = state
    gradient = bucket.buffer()
    scale(gradient)
    future = dist.all_reduce(gradient, group=group, async_op=True).get_future()
    return cast(
        "torch.futures.Future[Tensor]", future.then(lambda done: cast(Tensor, done.value()[0]))
    )
