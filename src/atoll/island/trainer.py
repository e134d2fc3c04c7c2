"""The built-in training loop of `atoll join`: the manifest's model, data and optimizer."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.data import registry as datasets
from atoll.island import inner_optimizer
from atoll.island.ranks import parallel
from atoll.island.ranks.parallel import Parallel
from atoll.island.run import Run
from atoll.island.sharded import trainer as ranks
from atoll.island.sharded.run import ShardedRun
from atoll.models import fingerprint, gpt
from atoll.models import registry as models
from atoll.protocol.manifest import InnerSettings
from atoll.versions import recorded


def train(
    run: Run | ShardedRun,
    *,
    location: str | None = None,
    device: torch.device | None = None,
    model: nn.Module | None = None,
    after_step: Callable[[], None] = lambda: None,
    kind: Parallel = "ddp",
) -> None:
    """Trains until the run is finished; `model`, if given, is this machine's own.

    In a torchrun group the model is spread by `kind`.
    """
    if isinstance(run, ShardedRun):
        ranks.train(run, location=location, model=model, after_step=after_step)
        return
    manifest = run.manifest
    if model is None:
        model = models.build(manifest.model.definition)
    else:
        fingerprint.check(model, recorded.layout_of(manifest))
    place = device or torch.device("cpu")
    model = model.to(place)
    if run.group.size > 1:
        model = parallel.spread(model, kind, device=place, ranks=run.group.size)
    optimizer = inner_optimizer.build_optimizer(model, manifest.inner)
    dataset = datasets.open_dataset(manifest.data.definition, location=location)
    run.load(model, optimizer, evaluate=gpt.loss_sum)
    with run.group.training():
        for rows in run.batches(dataset):
            if run.manifest is not manifest:  # a new version, at a round boundary
                manifest = run.manifest
                inner_optimizer.adjust(optimizer, manifest.inner)
            run.step(loss=_step(model, optimizer, rows, manifest.inner))
            after_step()


def _step(model: nn.Module, optimizer: Optimizer, rows: Tensor, settings: InnerSettings) -> Tensor:
    """One inner step on `rows`; its loss."""
    with torch.autocast(rows.device.type, torch.bfloat16, enabled=settings.precision == "bf16"):
        loss = gpt.loss(model, rows)
    loss.backward()  # type: ignore[no-untyped-call] # torch leaves backward untyped
    if settings.clip:
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss
