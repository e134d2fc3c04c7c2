"""One gradient from the slices of a batch: partial sums with honest counts, one division.

Rank r computes the gradient g_r of the mean loss over its n_r of the batch's N rows. The island's
gradient is sum_r (n_r / N) g_r, which is that of the mean over the joined batch; the plain mean
of the g_r, which DDP and FSDP2 make by themselves, is that only when all n_r are equal. A rank
without rows computes on a row that others have, and counts as zero.
"""

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from atoll.errors import ConfigError
from atoll.island.ranks.batch_slice import BatchSlice


def unwrapped(model: nn.Module) -> nn.Module:
    """The module whose parameter names are the run's."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def is_fsdp2(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to the model."""
    # Not by the type: loading FSDP2 takes most of a second, and few islands need it.
    return any(hasattr(parameter, "device_mesh") for parameter in model.parameters())


def install(model: nn.Module, share: BatchSlice, *, ranks: int) -> None:
    """From now on the backward pass of `model` combines gradients by honest counts."""
    if isinstance(model, DistributedDataParallel):
        try:
            model.register_comm_hook((share, model.process_group), _ddp_hook)
        except RuntimeError as exc:
            raise ConfigError(
                "the DDP model has a communication hook of its own; run.load sets the one that "
                "weighs each rank's rows, so leave the model without"
            ) from exc
    elif is_fsdp2(model):
        from atoll.island.ranks import fsdp2

        fsdp2.combine_by(share, model)
    elif ranks > 1:
        raise ConfigError(
            f"the model is on each of {ranks} ranks by itself, which would drift apart; wrap it "
            f"in DistributedDataParallel, or apply fully_shard, before run.load"
        )


def _ddp_hook(
    state: tuple[BatchSlice, dist.ProcessGroup],
    bucket: dist.GradBucket,  # type: ignore[name-defined] # torch checks for this very name
) -> torch.futures.Future[Tensor]:
    share, group = state
    gradient = bucket.buffer()
    share.scale(gradient)
    future = dist.all_reduce(gradient, group=group, async_op=True).get_future()
    return cast(
        "torch.futures.Future[Tensor]", future.then(lambda done: cast(Tensor, done.value()[0]))
    )
