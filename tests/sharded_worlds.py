"""Ranks as fibers against a coordinator that only answers, and ways to disturb them."""

import random
from functools import partial

from atoll.island.sharded import trainer
from atoll.island.sharded.run import ShardedRun
from atoll.island.state.store import IslandIdentity
from atoll.simulate.fibers import Scheduler
from atoll.simulate.sea import Sea
from atoll.strategies.sharded.units import Units
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

    def __init__(self, home, *, wanted, latencies=None, **changes):
        self.home = home
        home.mkdir(exist_ok=True)
        self.manifest, initial, layout = clusters.sharded_manifest(home, {**TABLE, **changes})
        self.units = Units.of(layout)
        self.scheduler = Scheduler()
        self.sea = Sea(self.scheduler, latencies=latencies)
        self.coordinator = StandIn(self.manifest, layout, initial, wanted=wanted)
        self.fibers = {}
        self.beside = {}
        self.steps = {}
        self.told = {}
        self.script = lambda run, after_step: trainer.train(run, after_step=after_step)

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
            self.told[name] = run.telemetry()
            self.scheduler.sleep(0.1)

        self.script(run, after_step)

    def kill(self, index):
        name = f"rank-{index}"
        for fiber in (self.fibers[name], *self.beside[name]):
            self.scheduler.stop(fiber)

    def run(self):
        self.scheduler.run_until(
            lambda: all(fiber.done for fiber in self.fibers.values()), limit_seconds=1000
        )

    def weights(self):
        assert self.coordinator.checkpoint is not None
        step, size, blobs = self.coordinator.checkpoint
        parts = [self.coordinator.blobs[sha256] for sha256 in blobs]
        return step, whole_weights(parts, self.units, size)


def when(world, condition, act):
    """Does `act` once `condition` holds, from a fiber of its own."""

    def wait():
        while not condition():
            world.scheduler.sleep(0.01)
        act()

    world.scheduler.spawn("test", wait)


def is_consistent(world, step):
    """Whether all ranks have told of their saves of a step; by then they are at a later one."""
    return world.coordinator.consistent is not None and world.coordinator.consistent[0] >= step


def begun(world, size):
    for index in range(size):
        world.start(index)
