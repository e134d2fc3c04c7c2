"""How much a rank holds: its shard, and never more than four of the largest units beside it."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from atoll.clock import Clock
from atoll.collectives.base import Collectives
from atoll.models import gpt
from atoll.strategies.sharded.budget import Budget
from atoll.strategies.sharded.engine import Engine
from atoll.strategies.sharded.shard import SAVED
from atoll.strategies.sharded.units import Units
from tests import sharded
from tests.sharded import Training

SIZE = {"block": 8, "layers": 6, "heads": 2, "width": 32}  # a block has 12,352 elements
SPARE_BYTES = 24 << 20  # activations, tiles under way, the allocator's own
ROOTS = {"small root": 30, "root like a block": 190, "large root": 1_000}  # by vocab


def training(vocab: int, **changes: Any) -> Training:
    model = {"architecture": "gpt", "vocab": vocab, **SIZE}
    return Training(model=model, steps=2, **changes)


def bound(units: Units, size: int) -> float:
    """1.1 x 16 bytes for each of a rank's elements, and four of the largest units."""
    return 1.1 * 16 * units.layout.size / size + 4 * 4 * units.largest


class Watched(Engine):
    """Knows the most that it held at once, beside its shard."""

    most = 0

    def _look(self) -> None:
        self.most = max(self.most, self.nbytes)

    def _gather(self, unit: int) -> None:
        super()._gather(unit)
        self._look()

    def _arrived(self, unit: int, held: Any, parameter: Any) -> None:
        super()._arrived(unit, held, parameter)
        self._look()

    def _reduce(self, unit: int) -> None:
        super()._reduce(unit)
        self._look()


class Hoarding(Watched):
    """Frees nothing until the end of a micro-batch."""

    def _let_go(self, unit: int, *, unless: frozenset[int] = frozenset()) -> None:
        if not unless:
            super()._let_go(unit)


def most(made: Training, size: int) -> int:
    def work(ranks: Collectives, clock: Clock) -> int:
        steps = sharded.opened(made, ranks, clock)
        for step in (1, 2):
            steps.train(step, sharded.own(made, step, ranks), gpt.loss, lr=1e-3)
        assert isinstance(steps.engine, Watched)
        return steps.engine.shard.nbytes + steps.engine.most

    return int(max(sharded.threads(size, work)))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("vocab", ROOTS.values(), ids=ROOTS)
def test_rank_holds_its_shard_and_at_most_four_units(vocab, size):
    made = training(vocab, engine=Watched)

    assert most(made, size) <= bound(made.units, size)


def test_engine_that_frees_nothing_holds_more():
    """The control of the test above."""
    made = training(ROOTS["root like a block"], engine=Hoarding)

    assert most(made, 4) > bound(made.units, 4)


@pytest.mark.parametrize(
    ("vocab", "wanted"),
    [(30, (True, True)), (190, (False, False)), (1_000, (True, True))],
    ids=ROOTS,
)
def test_work_is_done_ahead_where_memory_allows_it(vocab, wanted):
    budget = Budget.of(training(vocab).units, 4)

    assert (budget.gathers, budget.reduces) == wanted


# What the process really takes

PROGRAM = """
import json, sys
from pathlib import Path
import torch
from atoll.models import gpt
from tests import sharded
from tests.sharded import Training

torch.set_num_threads(1)
size = {"vocab": 64, "block": 4, "layers": 16, "heads": 2, "width": 192}
training = Training(model={"architecture": "gpt", **size}, batch=2, micro_batches=1)

def highest():
    # Not ru_maxrss, which begins with that of the process that started this one.
    [line] = [one for one in open("/proc/self/status") if one.startswith("VmHWM")]
    return int(line.split()[1]) * 1024

def grown(work):
    sharded.threads(2, work, chunk_bytes=1 << 20)
    return highest() - before

def trained(directory=None):
    def work(ranks, clock):
        steps = sharded.opened(training, ranks, clock, directory=directory)
        for step in (1, 2):
            steps.train(step, sharded.own(training, step, ranks), gpt.loss, lr=1e-3)
    return work

sharded.threads(2, sharded.trained(Training(steps=2)))  # code is loaded, pools are filled
before = highest()
disk = grown(trained(Path(sys.argv[1])))  # first: the highest mark never falls
print(json.dumps({"disk": disk, "memory": grown(trained())}))
"""


def test_process_takes_what_its_ranks_hold_and_little_with_the_shards_on_the_disk(tmp_path):
    """Two ranks in one process, with their activations: resident memory above an idle one."""
    size = {"vocab": 64, "block": 4, "layers": 16, "heads": 2, "width": 192}
    units = Training(model={"architecture": "gpt", **size}).units
    # Freed memory goes back to the system at once, so that the highest mark is what was held.
    told = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, **told},
    )

    grown = json.loads(done.stdout)
    shards = 16 * units.layout.size
    assert shards < grown["memory"] < 2 * bound(units, 2) + SPARE_BYTES
    assert grown["disk"] < 2 * 16 * units.largest + SPARE_BYTES < shards / 2


def test_shards_on_the_disk_train_to_the_same_bits(tmp_path):
    made = Training(steps=2)

    found = sharded.threads(2, sharded.trained(made, directory=tmp_path))
    wanted = sharded.threads(2, sharded.trained(made))

    for section in SAVED:
        a, b = ([rank.shard for rank in ranks] for ranks in (found, wanted))
        assert torch.equal(sharded.whole(made, a, section), sharded.whole(made, b, section))
