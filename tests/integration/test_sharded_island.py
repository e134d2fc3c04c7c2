"""A rank's life in groups, against a coordinator that only answers: forming, saves, failures."""

import random
from functools import partial

import pytest
import torch

from atoll import torch_threads
from atoll.island.sharded import trainer
from atoll.island.sharded.run import ShardedRun
from atoll.island.state.store import IslandIdentity
from atoll.simulate.fibers import Scheduler
from atoll.simulate.sharded.sea import Sea
from atoll.strategies.sharded.units import Units
from atoll.versions import recorded
from tests import clusters
from tests.sharded_stand_in import StandIn, StandInLink, whole_weights

TABLE = {
    "strategy": "sharded",
    "seed": 3,
    "model": {
        "architecture": "gpt", "vocab": 16, "block": 8, "layers": 2, "heads": 2, "width": 8,
    },
    "data": {
        "kind": "synthetic", "seed": 1, "rows": 500, "held_out_rows": 4, "block": 8, "vocab": 16,
    },
    "inner.batch": 7,
    "inner.lr": 0.01,
    "inner.clip": 1.0,
    "evaluate.every": 1,
    "stop.rounds": 3,
    "sharded.save_every": 2,
    "sharded.checkpoint_every": 2,
    "sharded.deadline_seconds": 5.0,
}  # fmt: skip


class World:
    """Ranks as fibers, and the stand-in that they talk to."""

    def __init__(self, home, *, wanted, **changes):
        self.home = home
        self.manifest, initial, layout = clusters.sharded_manifest(home, {**TABLE, **changes})
        self.units = Units.of(layout)
        self.scheduler = Scheduler()
        self.sea = Sea(self.scheduler)
        self.coordinator = StandIn(self.manifest, layout, initial, wanted=wanted)
        self.fibers = {}
        self.beside = {}
        self.steps = {}

    def start(self, index):
        name = f"rank-{index}"
        self.beside[name] = []
        self.fibers[name] = self.scheduler.spawn(name, partial(self._live, name, index))

    def _live(self, name, index):
        identity = IslandIdentity(name, random.Random(index).randbytes(32).hex())
        link = StandInLink(self.coordinator, self.scheduler)

        def spawn(part, work):
            self.beside[name].append(self.scheduler.spawn(f"{name} {part}", work))

        run = ShardedRun(
            link,
            self.home / name,
            self.scheduler,
            identity=identity,
            jitter=random.Random(index),
            host=self.sea.host(),
            spawn=spawn,
        )

        def after_step():
            self.steps[name] = run.steps
            self.scheduler.sleep(0.1)

        trainer.train(run, after_step=after_step)

    def kill(self, index):
        name = f"rank-{index}"
        for fiber in (self.fibers[name], *self.beside[name]):
            self.scheduler.stop(fiber)

    def run(self):
        self.scheduler.run_until(
            lambda: all(fiber.done for fiber in self.fibers.values()), limit_seconds=1000
        )

    def weights(self):
        step, size, blobs = self.coordinator.checkpoint
        parts = [self.coordinator.blobs[sha256] for sha256 in blobs]
        return step, whole_weights(parts, self.units, size)


@pytest.fixture(autouse=True)
def _one_thread():
    with torch_threads.kept():
        torch_threads.use(1)
        yield


def trained(home, size, **changes):
    world = World(home, wanted=size, **changes)
    for index in range(size):
        world.start(index)
    world.run()
    return world


@pytest.mark.parametrize("size", [1, 3])
def test_run_ends_with_every_round_checkpointed(tmp_path, size):
    world = trained(tmp_path, size)

    step, weights = world.weights()
    losses = [report.loss_sum / report.tokens for report in world.coordinator.losses.values()]

    assert (step, world.coordinator.committed) == (12, 3)
    assert bool(torch.isfinite(weights).all())
    assert losses[-1] < losses[0]
    assert all(report.tokens == 4 * 7 * 8 for report in world.coordinator.losses.values())
