"""How torchrun has placed this process, and the group it forms with the others.

Placement is a matter of this machine, never a setting of the run.
"""

import os
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from atoll.errors import ConfigError
from atoll.island.ranks.group import SOLO, Group
from atoll.island.ranks.torch_group import DEADLINE_SECONDS, TorchGroup

# What torchrun sets, and what `init_process_group` reads.
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def local_rank(variables: Mapping[str, str] = os.environ) -> int | None:
    """Which of this machine's ranks torchrun says this is; None for a process by itself."""
    if any(name not in variables for name in VARIABLES):
        return None
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        if not variables[name].isdecimal():
            found = f"{name}={variables[name]!r}"
            raise ConfigError(f"{found} is not a whole number; start with torchrun")
    return int(variables["LOCAL_RANK"])


def form_group(*, deadline_seconds: float | None = None) -> Group:
    """The group of this process: torchrun's, or that of the process group already there."""
    deadline = DEADLINE_SECONDS if deadline_seconds is None else deadline_seconds
    if dist.is_available() and dist.is_initialized():
        return TorchGroup(deadline_seconds=deadline)
    if local_rank() is None:
        return SOLO
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    timeout = timedelta(seconds=deadline)
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    # torchrun keeps one store over its restarts, in which a rank of the next life could find the
    # address of a dead one (torch 2.13, rendezvous.py: no prefix for each attempt).
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"atoll/{life}", store),  # type: ignore[attr-defined] # it is there
        rank=rank,
        world_size=size,
        timeout=timeout,
    )
    return TorchGroup(deadline_seconds=deadline, on_close=dist.destroy_process_group)
