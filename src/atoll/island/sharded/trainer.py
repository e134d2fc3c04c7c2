"""The built-in training loop of a rank: the manifest's model and data.

The optimizer is the run's.
"""

from collections.abc import Callable

from torch import nn

from atoll.data import registry as datasets
from atoll.island.sharded.run import ShardedRun
from atoll.models import gpt
from atoll.models import registry as models


def train(
    run: ShardedRun,
    *,
    location: str | None = None,
    model: nn.Module | None = None,
    after_step: Callable[[], None] = lambda: None,
) -> None:
    """Trains until the run is finished; `model`, if given, is this machine's own."""
    if model is None:
        model = models.hollow(run.manifest.model.definition)
    dataset = datasets.open_dataset(run.manifest.data.definition, location=location)
    run.load(model, evaluate=gpt.loss_sum)
    for rows in run.batches(dataset):
        loss = gpt.loss(model, rows)
        loss.backward()  # type: ignore[no-untyped-call] # torch leaves backward untyped
        run.step(loss=loss)
        after_step()
