"""Whether the demo's run learns as well as one process on the same rows and tokens.

Simulates examples/quickstart.toml with two islands (bit-equal to the processes of `make demo`) and
trains one process on the same row positions, in the same order, with both islands' batches joined.

    python -m benchmarks.loss [--json]
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn

from atoll import config
from atoll.config import RunFile
from atoll.data import base, batches
from atoll.data import registry as datasets
from atoll.island import inner_optimizer
from atoll.models import gpt, init
from atoll.models import registry as models
from atoll.protocol.manifest import InnerSettings
from atoll.rows import RowRange
from atoll.simulate import cluster
from benchmarks.report import Bar, report, show

RUN_FILE = Path("examples/quickstart.toml")
ISLANDS = 2


def single_process(run_file: RunFile) -> float:
    """The held-out loss of one process that trains on every row of the run once."""
    settings = InnerSettings.model_validate(dict(run_file.settings["inner"]))
    steps = run_file.settings["sync_every"] * run_file.settings["stop"]["rounds"]
    dataset = datasets.open_dataset(run_file.data)
    model = models.build(run_file.model)
    layout = models.layout_of(model)
    model.load_state_dict(dict(init.initial_weights(layout, seed=run_file.settings["seed"])))
    optimizer = inner_optimizer.build_optimizer(model, settings)
    name = base.dataset_id(dataset.identity())
    rows = RowRange(name, 0, steps * settings.batch * ISLANDS)
    seed = run_file.settings["seed"]
    for batch in batches.batches(dataset, [rows], batch=settings.batch * ISLANDS, seed=seed):
        loss = gpt.loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return held_out_loss(model, dataset)


def held_out_loss(model: nn.Module, dataset: Any) -> float:
    total, tokens = 0.0, 0
    with torch.no_grad():
        for batch in batches.held_out_batches(dataset, range(dataset.held_out_rows), batch=16):
            loss, count = gpt.loss_sum(model, batch)
            total, tokens = total + loss, tokens + count
    return total / tokens


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--json", action="store_true")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    run_file = config.load(RUN_FILE)
    simulated = cluster.simulate(run_file, islands=ISLANDS)
    islands = simulated.status.history[-1].evaluation_loss
    assert islands is not None
    alone = single_process(run_file)
    unigram = base.unigram_entropy(datasets.open_dataset(run_file.data))
    results = {
        "islands_loss": islands,
        "single_process_loss": alone,
        "unigram_entropy": unigram,
        "tokens": simulated.status.tokens,
        "digest": simulated.digest,
    }
    bars = [
        Bar("loss over one process's", islands / alone, 1.05),
        Bar("loss over unigram entropy", islands / unigram, 0.80),
    ]
    show(report(results, bars), as_json=given.json)


if __name__ == "__main__":
    main()
