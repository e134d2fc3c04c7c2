"""What the ranks of a crew are told to do in its tests."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from atoll.collectives.base import Key
from atoll.errors import ConfigError
from atoll.pools.gradcheck.crew_rank import WorldRank

Spec = dict[str, Any]


def add(world: WorldRank, spec: Spec, folder: Path) -> None:
    """Sums over both groups, and what the process is."""
    ours, theirs = torch.tensor([world.rank + spec["more"]]), torch.tensor([world.rank])
    world.group.all_reduce(Key(group=world.job, step=1, op="reduce"), ours).wait()
    dist.all_reduce(theirs, group=world.process_group)
    save_file({"ours": ours, "theirs": theirs}, folder / f"{world.rank}.safetensors")
    about = {"pid": os.getpid(), "threads": torch.get_num_threads(), "job": world.job}
    (folder / f"{world.rank}.json").write_text(json.dumps(about))


def one_raises(world: WorldRank, spec: Spec, folder: Path) -> None:
    """The others wait for it in a collective."""
    if world.rank == spec["rank"]:
        raise ConfigError("coeff=-1 must be positive")
    dist.barrier()


def all_raise(world: WorldRank, spec: Spec, folder: Path) -> None:
    raise KeyError("tokens")


def one_dies(world: WorldRank, spec: Spec, folder: Path) -> None:
    if world.rank == spec["rank"]:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def one_is_late(world: WorldRank, spec: Spec, folder: Path) -> None:
    if world.rank == spec["rank"]:
        signal.pause()


def prints(world: WorldRank, spec: Spec, folder: Path) -> None:
    """And tells where that goes."""
    print("said by a rank", flush=True)
    for name in ("stdout", "stderr"):
        end = {"stdout": 1, "stderr": 2}[name]
        (folder / f"{name}-{world.rank}").write_text(os.readlink(f"/proc/self/fd/{end}"))


def leaves(world: WorldRank, spec: Spec, folder: Path) -> None:
    dist.destroy_process_group()
