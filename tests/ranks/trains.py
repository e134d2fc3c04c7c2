"""A rank that trains one run after another: `trains.py FOLDER KIND URL [KIND URL …]`.

KIND is `ddp` or `fsdp2`, or `naive`: DDP with the plain mean of the ranks' gradients, which is
what honest counts are held against. Writes FOLDER/rank-R.json.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import atoll
from atoll.codecs.fp32.codec import Fp32
from atoll.island import trainer
from atoll.island.ranks import parallel
from atoll.island.ranks.batch_slice import BatchSlice
from atoll.island.ranks.parallel import Parallel
from atoll.island.ranks.torch_group import TorchGroup
from atoll.island.state.weights import IslandWeights
from atoll.layout import Layout
from atoll.strategies import registry
from atoll.strategies.base import Strategy


def plain_mean(self: BatchSlice, gradient: Tensor) -> None:
    gradient.div_(dist.get_world_size())


def shared_buffers(kind: Parallel, strategy: Strategy) -> list[float]:
    """Running statistics that differ by rank, after the ranks took a version in."""
    norm = nn.BatchNorm1d(2)
    layout = Layout.of([(n, tuple(p.shape), "float32") for n, p in norm.named_parameters()])
    assert norm.running_mean is not None and norm.num_batches_tracked is not None
    norm.running_mean.fill_(float(dist.get_rank() + 5))
    norm.num_batches_tracked.fill_(dist.get_rank() + 7)
    # Copies are not wrapped: DDP would share the buffers by itself.
    model = norm if kind == "ddp" else spread(norm, kind)
    weights = IslandWeights(model, layout, strategy=strategy, download=Fp32(), group=TorchGroup())
    weights.adopt(1, "0" * 64)
    weights.reset()
    return [*norm.running_mean.tolist(), float(norm.num_batches_tracked)]


def spread(model: nn.Module, kind: Parallel) -> nn.Module:
    return parallel.spread(model, kind, device=torch.device("cpu"), ranks=dist.get_world_size())


def main() -> None:
    folder, words = Path(sys.argv[1]), sys.argv[2:]
    dist.init_process_group("gloo")  # as a script of its own does; atoll.join takes it as it is
    torch.set_num_threads(1)
    honest = BatchSlice.scale
    rank = dist.get_rank()
    found = []
    for number, (kind, url) in enumerate(zip(words[::2], words[1::2], strict=True)):
        BatchSlice.scale = plain_mean if kind == "naive" else honest  # type: ignore[method-assign] # the control
        run = atoll.join(
            url,
            token=os.environ["ATOLL_TOKEN"],
            worker_id="island",
            state=folder / f"state-{number}",
        )
        trainer.train(run, kind="fsdp2" if kind == "fsdp2" else "ddp")
        found.append({"kind": kind, "version": run.version, "digest": run.digest})
    part = folder / f"part-{rank}"
    strategy = registry.of(run.manifest)
    shared = {kind: shared_buffers(kind, strategy) for kind in ("ddp", "fsdp2")}
    part.write_text(json.dumps({"runs": found, "buffers": shared}))
    part.rename(folder / f"rank-{rank}.json")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
