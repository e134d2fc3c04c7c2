"""One gradient from the slices of a batch: partial sums with honest counts, one division.

Rank r computes the gradient g_r of the mean loss over its n_r of the batch's N rows. The island's
gradient is sum_r (n_r / N) g_r, which is that of the mean over the joined batch; the plain mean
of the g_r, which DDP and FSDP2 make by themselves, is that only when all n_r are equal. A rank
without rows computes on a row that others have, and counts as zero. The sum itself is made by
`pools.adapters`.
"""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from atoll.errors import ConfigError
from atoll.island.ranks.batch_slice import BatchSlice
from atoll.pools.adapters import install as adapters
from atoll.pools.adapters.base import Adapter, is_fsdp2
from atoll.pools.adapters.probe import probe


def install(model: nn.Module, share: BatchSlice, *, ranks: int) -> Adapter | None:
    """From now on the backward pass of `model` combines gradients by honest counts.

    None for a model that is by itself, in an island of one process.
    """
    if isinstance(model, DistributedDataParallel) or is_fsdp2(model):
        return adapters.sum_gradients(model, share.scale)
    if ranks > 1:
        raise ConfigError(
            f"the model is on each of {ranks} ranks by itself, which would drift apart; wrap it "
            f"in DistributedDataParallel, or apply fully_shard, before run.load"
        )
    return None


def check(adapter: Adapter, share: BatchSlice, *, ranks: int) -> None:
    """Collective: NotSummed unless a known gradient arrives as the sum of its weighed parts."""
    share.slice(torch.empty(2 * ranks + 1))  # as of a batch that cannot be shared evenly
    try:
        probe(adapter)
    finally:
        share.clear()
