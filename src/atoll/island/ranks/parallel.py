"""How the built-in trainer spreads its model over the ranks of an island."""

from typing import Literal, get_args

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from atoll.errors import ConfigError

Parallel = Literal["ddp", "fsdp2"]
KINDS: tuple[str, ...] = get_args(Parallel)


def check(kind: str) -> Parallel:
    """`kind` as one of the known ones."""
    if kind not in KINDS:
        raise ConfigError(f"--parallel {kind!r} is not known; use one of {', '.join(KINDS)}")
    return kind  # type: ignore[return-value] # just checked


def spread(model: nn.Module, kind: Parallel, *, device: torch.device, ranks: int) -> nn.Module:
    """`model` for this rank: copies with DDP, shards with FSDP2."""
    if kind == "ddp":
        ids = [device] if device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (ranks,))
    for layers in (m for m in model.modules() if isinstance(m, nn.ModuleList)):
        for layer in layers:
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
