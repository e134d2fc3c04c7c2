"""One run of benchmarks/parity.py: the text, one process on it, and islands on it.

Owns the model and the inner settings, which all runs share; says nothing about outer ones.
"""

import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from atoll import config
from atoll.data import base, batches
from atoll.data import registry as datasets
from atoll.island import inner_optimizer
from atoll.models import gpt, init
from atoll.models import registry as models
from atoll.protocol.manifest import InnerSettings
from atoll.rows import RowRange
from atoll.simulate import cluster

ROWS_A_STEP = 16  # of all islands together
BLOCK = 64
MODEL = {
    "architecture": "gpt",
    "vocab": 256,
    "block": BLOCK,
    "layers": 4,
    "heads": 4,
    "width": 64,
}
DATA = {"kind": "text", "block": BLOCK, "held_out_rows": 1024}
# Islands need a warm-up more than one process: measured at 800 steps, seed 1, H = 50, the gap is
# 9.9 % without and 3.8 % with it, while one process alone is 0.7 % better without.
WARMUP_PART = 20
TEXT_BYTES = 6_000_000  # 2,000 steps read 2 MB of them: no row twice
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True, kw_only=True)
class Task:
    """A run to be made; without islands it is one process, whose outer settings do not matter."""

    row: str
    seed: int
    steps: int
    text: str  # path
    islands: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    speeds: tuple[float, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    row: str
    seed: int
    loss: float  # held out, nats per byte
    tokens: int
    seconds: float


def write_text(path: Path) -> None:
    """The standard library's own sources, in the order of their paths, up to TEXT_BYTES."""
    home = Path(sysconfig.get_paths()["stdlib"])
    with path.open("wb") as file:
        for source in sorted(home.rglob("*.py")):
            if not _LEFT_OUT & {*source.relative_to(home).parts}:
                file.write(source.read_bytes()[: TEXT_BYTES - file.tell()])


def inner(steps: int, *, batch: int) -> dict[str, Any]:
    """The inner settings of every run of so many steps."""
    tokens = steps * ROWS_A_STEP * BLOCK
    warmup = tokens // WARMUP_PART
    schedule = {"kind": "cosine", "warmup_tokens": warmup, "total_tokens": tokens}
    return {"optimizer": "adamw", "lr": 3e-3, "batch": batch, "threads": 1, "schedule": schedule}


def measure(task: Task) -> Outcome:
    """Makes the run in this process, on one core."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    loss, tokens = _islands(task) if task.islands else _alone(task)
    return Outcome(task.row, task.seed, loss, tokens, time.perf_counter() - began)


def _islands(task: Task) -> tuple[float, int]:
    rounds = task.steps * task.settings.get("num_fragments", 1) // task.settings["sync_every"]
    table = {
        "name": "parity",
        "seed": task.seed,
        "model": MODEL,
        "data": {**DATA, "path": task.text},
        "inner": inner(task.steps, batch=ROWS_A_STEP // task.islands),
        "membership": {"min_workers": task.islands},
        "evaluate": {"every": 1_000_000},  # at the end alone
        "stop": {"rounds": rounds},
        "storage": {"retain": "snapshots"},
        **task.settings,
    }
    run_file = config.parse(table)
    # Only async knows speeds, and only a program that has it takes them.
    options: dict[str, Any] = {"speeds": task.speeds} if task.speeds else {}
    found = cluster.simulate(
        run_file, islands=task.islands, location=run_file.data_location, **options
    )
    loss = found.status.history[-1].evaluation_loss
    assert loss is not None, found.status
    return loss, found.status.tokens


def _alone(task: Task) -> tuple[float, int]:
    """A plain loop over the rows of the islands' runs, all of a step in one batch."""
    settings = InnerSettings.model_validate(inner(task.steps, batch=ROWS_A_STEP))
    dataset = datasets.open_dataset(DATA, location=task.text)
    model = models.build(MODEL)
    weights = init.initial_weights(models.layout_of(model), seed=task.seed)
    model.load_state_dict(dict(weights))
    optimizer = inner_optimizer.build_optimizer(model, settings)
    name = base.dataset_id(dataset.identity())
    rows = [RowRange(name, 0, task.steps * ROWS_A_STEP)]
    tokens = 0
    for batch in batches.batches(dataset, rows, batch=ROWS_A_STEP, seed=task.seed):
        inner_optimizer.set_rate(optimizer, settings, global_tokens=tokens)
        gpt.loss(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tokens += batch.shape[0] * BLOCK
    return held_out_loss(model, dataset), tokens


def held_out_loss(model: nn.Module, dataset: base.Dataset) -> float:
    """Nats per byte over all held-out rows."""
    total, tokens = 0.0, 0
    for batch in batches.held_out_batches(dataset, range(dataset.held_out_rows), batch=16):
        loss, count = gpt.loss_sum(model, batch)
        total, tokens = total + loss, tokens + count
    return total / tokens
