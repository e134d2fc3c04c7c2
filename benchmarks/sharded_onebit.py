"""1-bit Adam against AdamW: loss after the warm-up and bytes of gradients, by seed and size.

Two ranks as threads of this process train the same rows from the same weights, once with each. Part
of `benchmarks.sharded`; alone:

    python -m benchmarks.sharded_onebit
"""

import json
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from atoll.clock import SystemClock
from atoll.collectives.base import Label
from atoll.collectives.local import LocalGroup, LocalPort
from atoll.collectives.runners import Threaded
from atoll.data.registry import open_dataset
from atoll.models import gpt, init, registry
from atoll.strategies.sharded import micro_batches
from atoll.strategies.sharded.adamw import AdamW
from atoll.strategies.sharded.engine import Engine
from atoll.strategies.sharded.shard import Shard
from atoll.strategies.sharded.step import Made, Step
from atoll.strategies.sharded.units import Units
from benchmarks.report import Bar

RANKS = 2
WARM_UP = 5  # one step in so many
LAST = 10  # steps whose mean loss is compared
BATCH = 8
CHUNK_BYTES = 1 << 20
LOSS_AIM, BYTES_AIM = 1.05, 20.0


@dataclass(frozen=True)
class Case:
    """What is trained: seeds of the weights and of the data, and a model."""

    seed: int
    width: int
    layers: int
    vocab: int = 32
    block: int = 16
    rate: float = 2e-3
    steps: int = 120

    @property
    def model(self) -> dict[str, Any]:
        size = {"vocab": self.vocab, "block": self.block, "layers": self.layers, "heads": 2}
        return {"architecture": "gpt", "width": self.width, **size}

    def rows(self) -> Callable[[int], Tensor]:
        """The global rows of a step."""
        data = {"kind": "synthetic", "seed": self.seed, "rows": 10_000, "held_out_rows": 1}
        found = open_dataset({**data, "block": self.block, "vocab": self.vocab})

        def rows(step: int) -> Tensor:
            wanted = range(step * BATCH, (step + 1) * BATCH)
            return torch.stack([torch.as_tensor(found.row(row)) for row in wanted])

        return rows


LARGER: dict[str, Any] = {"width": 128, "layers": 4, "vocab": 64, "block": 32, "rate": 1e-3}
# Of the larger model both lengths: right after the warm-up signs lag behind, and catch up later.
CASES = {
    "seed 2": Case(seed=2, width=32, layers=2),
    "seed 3": Case(seed=3, width=32, layers=2),
    "larger": Case(seed=4, **LARGER),
    "larger, twice as long": Case(seed=4, steps=240, **LARGER),
}


@dataclass(frozen=True)
class Outcome:
    """What both trainings of a case came to."""

    parameters: int
    adamw_loss: float
    onebit_loss: float
    loss_ratio: float
    adamw_gradient_bytes: int  # of one step, all ranks
    onebit_gradient_bytes: int
    gradient_bytes_ratio: float


def trained(case: Case, *, warm_up: int) -> tuple[float, int]:
    """The mean loss of the last steps, and the bytes of gradients in the last one."""
    units, rows = Units.of_model(registry.layout(case.model)), case.rows()
    group = LocalGroup(RANKS, clock=SystemClock())
    sent: Counter[tuple[int, str]] = Counter()
    lock, plain = threading.Lock(), LocalPort.send

    def counting(self: LocalPort, to: int, label: Label, values: Tensor) -> None:
        with lock:
            sent[label.key.step, label.key.op] += values.nbytes
        plain(self, to, label, values)

    def work(rank: int) -> list[Made]:
        runner = Threaded(f"rank-{rank}")
        ranks = group.rank(rank, runner, way="direct", chunk_bytes=CHUNK_BYTES)
        shard = Shard(units, rank=rank, size=RANKS)
        offsets = {t.name: t.offset for t in units.layout.tensors}
        for name, values in init.initial_weights(units.layout, seed=case.seed):
            shard.fill("weights", offsets[name], values.reshape(-1))
        model = registry.hollow(case.model)
        engine = Engine(model, shard, ranks, group=1, clock=SystemClock())
        step = Step(engine, AdamW(), clip=1.0, onebit_warmup_steps=warm_up)
        (part,) = micro_batches.of(BATCH, rank=rank, size=RANKS, count=1)
        made = []
        for number in range(1, case.steps + 1):
            ranks.advance(number)
            given = [(part.rows.of(rows(number)), part.num_rows * case.block)]
            made.append(step.train(number, given, gpt.loss, lr=case.rate * min(1.0, number / 5)))
        runner.close()
        return made

    with mock.patch.object(LocalPort, "send", counting), ThreadPoolExecutor(RANKS) as pool:
        first, *_ = pool.map(work, range(RANKS))
    last = first[-LAST:]
    loss = sum(made.loss_sum for made in last) / sum(made.tokens for made in last)
    return loss, sent[case.steps, "reduce"]


def compared(case: Case) -> Outcome:
    """Both trainings of a case."""
    exact, exact_bytes = trained(case, warm_up=0)
    signs, sign_bytes = trained(case, warm_up=case.steps // WARM_UP)
    return Outcome(
        parameters=registry.layout(case.model).size,
        adamw_loss=exact,
        onebit_loss=signs,
        loss_ratio=signs / exact,
        adamw_gradient_bytes=exact_bytes,
        onebit_gradient_bytes=sign_bytes,
        gradient_bytes_ratio=exact_bytes / sign_bytes,
    )


def measured() -> dict[str, dict[str, float]]:
    """Every case by its name."""
    return {name: asdict(compared(case)) for name, case in CASES.items()}


def bars(found: dict[str, dict[str, float]]) -> list[Bar]:
    """The issue's aims."""
    made = []
    for name, one in found.items():
        made.append(Bar(f"1-bit Adam, {name}: loss, of AdamW's", one["loss_ratio"], LOSS_AIM))
        fewer = one["gradient_bytes_ratio"]
        made.append(Bar(f"1-bit Adam, {name}: times fewer bytes", fewer, BYTES_AIM, at_least=True))
    return made


def main() -> None:
    torch.set_num_threads(1)
    found = measured()
    shown = {"onebit": found, "bars": [bar.as_json() for bar in bars(found)]}
    sys.stdout.write(json.dumps(shown, indent=2) + "\n")


if __name__ == "__main__":
    main()
