"""A rank's life in groups, against a coordinator that only answers: forming, saves, failures."""

import random
from functools import partial

import pytest
import torch

from atoll import torch_threads
from atoll.data import registry as datasets
from atoll.errors import ConfigError
from atoll.island.sharded import restore as restoring
from atoll.island.sharded import trainer
from atoll.island.sharded.run import ShardedRun
from atoll.island.state.store import IslandIdentity
from atoll.models import gpt
from atoll.models import registry as models
from atoll.protocol.sharded import SaveReport
from atoll.simulate.fibers import Scheduler
from atoll.simulate.sea import Sea
from atoll.strategies.sharded.saves import Saves
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


# Failures


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


def continued(world, group, home, tmp_path, *, until):
    """A calm run of that group's size, from what it went back to, up to round `until`."""
    restore = group.restore
    calm = World(home, wanted=len(group.members), **{"stop.rounds": until})
    steps = calm.manifest.sharded.round_steps
    calm.coordinator.committed = restore.step // steps
    if restore.source == "save":
        shards = [SHARDS[root] for root in restore.parts]
        parts = tuple(calm.coordinator.store(shard) for shard in shards)
        calm.coordinator.checkpoint = restore.step, restore.size, parts
    elif restore.source == "checkpoint":
        calm.coordinator.blobs.update(world.coordinator.blobs)
        calm.coordinator.roots.update(world.coordinator.roots)
        calm.coordinator.checkpoint = restore.step, restore.size, restore.parts
    begun(calm, len(group.members))
    calm.run()
    return calm


SHARDS: dict[str, bytes] = {}


@pytest.fixture(autouse=True)
def _shards(monkeypatch):
    """Every shard of every complete pair, by its root."""
    SHARDS.clear()
    complete = Saves.complete

    def kept(self, draft):
        held = complete(self, draft)
        SHARDS[held.own] = (draft.directory / "own").read_bytes()
        return held

    monkeypatch.setattr(Saves, "complete", kept)


def rows_of(world):
    return sum(report.tokens for report in world.coordinator.losses.values())


def test_killed_rank_costs_the_steps_since_the_last_save(tmp_path):
    world = World(tmp_path / "a", wanted=4)
    coordinator = world.coordinator
    begun(world, 4)

    def kill():
        world.kill(2)
        coordinator.wanted = 3
        coordinator.evict("rank-2")

    when(world, lambda: is_consistent(world, 6), kill)
    world.run()
    second = coordinator.formed[1]
    calm = continued(world, second, tmp_path / "b", tmp_path, until=3)

    assert [len(group.members) for group in coordinator.formed] == [4, 3]
    assert (second.restore.source, second.restore.step) == ("save", 6)
    assert coordinator.committed == 3
    assert rows_of(world) == 3 * 4 * 7 * 8
    assert torch.equal(world.weights()[1], calm.weights()[1])


def test_steps_that_a_group_goes_back_over_are_counted_and_logged(tmp_path, caplog):
    world = World(tmp_path, wanted=3, **{"sharded.save_every": 4, "sharded.checkpoint_every": 1})
    begun(world, 3)

    def kill():
        world.kill(2)
        world.coordinator.wanted = 2
        world.coordinator.evict("rank-2")

    when(world, lambda: world.steps.get("rank-0", 0) == 6, kill)
    world.run()

    assert world.coordinator.formed[1].restore.step == 4
    lost = [world.told[name].rolled_back_steps for name in ("rank-0", "rank-1")]
    # Made in all, less the last step's number: what was made twice.
    assert lost == [world.steps[name] - 11 for name in ("rank-0", "rank-1")]
    assert lost == [2, 2]
    logged = [r for r in caplog.records if r.message == "steps are rolled back"]
    assert [(r.reached, r.step, r.lost) for r in logged] == [(6, 4, 2), (6, 4, 2)]


def test_seconds_and_bytes_between_ranks_are_told(tmp_path):
    names = [f"rank-{index}" for index in range(2)]
    far = {a: {b: 0.05 for b in names if b != a} for a in names}
    worlds = [
        World(tmp_path / str(number), wanted=2, latencies=latencies, **{"stop.rounds": 1})
        for number, latencies in enumerate((None, far))
    ]
    for world in worlds:
        begun(world, 2)
        world.run()

    near, away = (world.told["rank-0"] for world in worlds)
    # On the virtual clock only the way between ranks takes time.
    assert (near.gather_seconds, near.reduce_seconds) == (0.0, 0.0)
    assert away.gather_seconds >= 3 * 0.05
    assert away.reduce_seconds >= 3 * 0.05
    assert near.communication_share in (None, 0.0)
    assert 0.0 < away.communication_share <= 1.0
    # All that one sends the other receives, but for what is under way; a step moves the model's
    # halves at least three times.
    other = worlds[0].told["rank-1"]
    half = 4 * worlds[0].units.layout.size // 2
    assert near.rank_bytes_sent >= 3 * 3 * half
    assert near.rank_bytes_sent == pytest.approx(other.rank_bytes_received, rel=0.2)


def test_two_neighbours_killed_go_back_to_the_checkpoint(tmp_path):
    world = World(tmp_path / "a", wanted=4)
    coordinator = world.coordinator
    begun(world, 4)

    def kill():
        for index in (1, 2):
            world.kill(index)
        coordinator.wanted = 2
        coordinator.evict("rank-1")
        coordinator.evict("rank-2")

    when(world, lambda: is_consistent(world, 6), kill)
    world.run()
    second = coordinator.formed[1]
    calm = continued(world, second, tmp_path / "b", tmp_path, until=3)

    assert (second.restore.source, second.restore.step) == ("checkpoint", 4)
    assert coordinator.committed == 3
    assert torch.equal(world.weights()[1], calm.weights()[1])


def spoiling(world, names):
    """One bit of the first range that is fetched of these blobs is turned round; how many were."""
    spoilt: list[str] = []

    def spoil(sha256, data):
        if sha256 not in names() or spoilt:
            return data
        spoilt.append(sha256)
        return data[:12] + bytes([data[12] ^ 1]) + data[13:]

    world.coordinator.spoil = spoil
    return spoilt


def given_up(caplog):
    return {r.code for r in caplog.records if r.message == "a step is given up"}


def test_initial_weights_that_came_damaged_are_not_trained_on(tmp_path, caplog):
    world, calm = (World(tmp_path / name, wanted=2, **{"stop.rounds": 1}) for name in "ab")
    spoilt = spoiling(world, lambda: {world.coordinator.initial})
    for one in (world, calm):
        begun(one, 2)
        one.run()

    assert len(spoilt) == 1
    assert "BLOB_CHANGED" in given_up(caplog)
    assert torch.equal(world.weights()[1], calm.weights()[1])


@pytest.mark.parametrize("what", ["bytes", "hashes"])
def test_checkpoint_that_came_damaged_is_not_trained_on(tmp_path, caplog, what):
    home = tmp_path / "a"
    first = World(home, wanted=2, **{"stop.rounds": 1})
    begun(first, 2)
    first.run()
    assert first.coordinator.checkpoint is not None
    step, _, parts = first.coordinator.checkpoint
    worlds = [World(tmp_path / name, wanted=3, **{"stop.rounds": 2}) for name in "bc"]
    for world in worlds:
        coordinator = world.coordinator
        coordinator.committed = 1
        kept = tuple(coordinator.store(first.coordinator.blobs[part]) for part in parts)
        coordinator.checkpoint = step, 2, kept
    fetched = set(parts) if what == "bytes" else {first.coordinator.roots[part] for part in parts}
    spoilt = spoiling(worlds[0], lambda: fetched)
    for world in worlds:
        begun(world, 3)
        world.run()

    assert len(spoilt) == 1
    assert "BLOB_CHANGED" in given_up(caplog)
    assert torch.equal(worlds[0].weights()[1], worlds[1].weights()[1])


def test_silent_rank_is_named_by_all_who_miss_it(tmp_path):
    world = World(tmp_path, wanted=3)
    coordinator = world.coordinator
    begun(world, 3)
    when(world, lambda: world.steps.get("rank-1", 0) >= 3, lambda: world.kill(1))

    def evict():
        coordinator.wanted = 2
        coordinator.evict("rank-1")

    when(world, lambda: len(coordinator.missing) >= 1, evict)
    world.run()

    named = {name for report in coordinator.missing for name in report.missing}
    assert named == {"rank-1"}
    assert coordinator.committed == 3


def test_newcomer_enters_at_a_checkpoint(tmp_path):
    world = World(tmp_path / "a", wanted=2)
    coordinator = world.coordinator
    begun(world, 2)

    def join():
        coordinator.wanted = 3
        world.start(2)

    when(world, lambda: world.steps.get("rank-1", 0) >= 2, join)
    world.run()
    second = coordinator.formed[1]
    calm = continued(world, second, tmp_path / "b", tmp_path, until=3)

    assert [len(group.members) for group in coordinator.formed] == [2, 3]
    assert second.restore.step == 4
    assert coordinator.reasons[0] == "somebody waits"
    assert torch.equal(world.weights()[1], calm.weights()[1])


def test_ranks_train_to_the_next_checkpoint_without_a_coordinator(tmp_path):
    world = World(tmp_path / "a", wanted=3)
    coordinator = world.coordinator
    begun(world, 3)
    reached = []

    def away():
        coordinator.is_away = True
        world.scheduler.sleep(30.0)
        reached.append(dict(world.steps))
        coordinator.is_away = False

    when(world, lambda: world.steps.get("rank-1", 0) >= 2, away)
    world.run()
    calm = trained(tmp_path / "b", 3)

    assert [set(steps.values()) for steps in reached] == [{3}]  # told before the fourth is counted
    assert len(coordinator.formed) == 1
    assert torch.equal(world.weights()[1], calm.weights()[1])


def test_nobody_drops_or_makes_a_save_before_all_have_read_theirs(tmp_path, monkeypatch):
    world = World(tmp_path, wanted=4)
    coordinator, events = world.coordinator, []
    restore, drop, begin = restoring.restore, Saves.went_back_to, Saves.begin

    def slow(wanted, new, *given, **more):
        if wanted.source == "save" and new.rank == 0:
            world.scheduler.sleep(3.0)
        restore(wanted, new, *given, **more)
        events.append((wanted.source, new.rank))

    def dropping(self, step, **more):
        events.append(("dropped", step))
        drop(self, step, **more)

    def beginning(self, step, **more):
        events.append(("begun", step))
        return begin(self, step, **more)

    def kill():
        world.kill(2)
        coordinator.wanted = 3
        coordinator.evict("rank-2")

    monkeypatch.setattr(restoring, "restore", slow)
    monkeypatch.setattr(Saves, "went_back_to", dropping)
    monkeypatch.setattr(Saves, "begin", beginning)
    begun(world, 4)
    when(world, lambda: is_consistent(world, 6), kill)
    world.run()

    first = next(place for place, (kind, _) in enumerate(events) if kind == "save")
    assert sorted(events[first : first + 3]) == [("save", 0), ("save", 1), ("save", 2)]
    assert events[first + 3 : first + 6] == [("dropped", 6)] * 3


def test_save_that_is_gone_when_the_coordinator_is_back_is_not_told_of(tmp_path, monkeypatch):
    world = World(tmp_path, wanted=2, **{"sharded.save_every": 1, "sharded.checkpoint_every": 8})
    coordinator, told = world.coordinator, []
    answer = coordinator.answer

    def noting(message):
        reply = answer(message)
        if isinstance(message, SaveReport) and message.identity.worker_id == "rank-0":
            told.append(message.save.step)
        return reply

    def away():
        coordinator.is_away = True
        world.scheduler.sleep(10.0)
        coordinator.is_away = False

    monkeypatch.setattr(coordinator, "answer", noting)
    begun(world, 2)
    when(world, lambda: is_consistent(world, 2), away)
    world.run()

    # The fourth was being told when the coordinator went; of later ones the newest two are kept.
    assert told[:6] == [1, 2, 3, 4, 7, 8]
    assert coordinator.committed == 3


def test_damaged_save_is_read_from_another_holder(tmp_path):
    world = World(tmp_path / "a", wanted=4)
    coordinator = world.coordinator
    begun(world, 4)

    def kill():
        world.kill(2)
        # Rank 1's shard is on rank 1 and on the dead one; rank 0's on 0 and 1.
        path = next((tmp_path / "a" / "rank-0" / "saves").glob("save-6-*")) / "own"
        data = bytearray(path.read_bytes())
        data[100] ^= 1
        path.write_bytes(data)
        coordinator.wanted = 3
        coordinator.evict("rank-2")

    when(world, lambda: is_consistent(world, 6), kill)
    world.run()
    calm = continued(world, coordinator.formed[1], tmp_path / "b", tmp_path, until=3)

    assert coordinator.committed == 3
    assert torch.equal(world.weights()[1], calm.weights()[1])


def test_save_that_nobody_holds_right_leads_to_an_older_state(tmp_path):
    world = World(tmp_path / "a", wanted=4)
    coordinator = world.coordinator
    begun(world, 4)

    def kill():
        world.kill(2)
        for holder, name in (("rank-1", "own"),):
            path = next((tmp_path / "a" / holder / "saves").glob("save-6-*")) / name
            data = bytearray(path.read_bytes())
            data[100] ^= 1
            path.write_bytes(data)
        coordinator.wanted = 3
        coordinator.evict("rank-2")

    when(world, lambda: is_consistent(world, 6), kill)
    world.run()

    assert [group.restore.step for group in coordinator.formed][-1] == 4
    assert coordinator.committed == 3


# Scripts


def own_loop(run, after_step, evaluate=gpt.loss_sum):
    """What a training script writes; the model has no memory of its own."""
    model = models.hollow(run.manifest.model.definition)
    dataset = datasets.open_dataset(run.manifest.data.definition)
    run.load(model, evaluate=evaluate)
    for rows in run.batches(dataset):
        loss = gpt.loss(model, rows)
        loss.backward()
        run.step(loss=loss)
        after_step()


def test_script_trains_as_the_built_in_loop_does(tmp_path):
    world = World(tmp_path / "a", wanted=2, **{"sharded.micro_batches": 2})
    world.script = own_loop
    begun(world, 2)
    world.run()
    built_in = trained(tmp_path / "b", 2, **{"sharded.micro_batches": 2})

    assert torch.equal(world.weights()[1], built_in.weights()[1])


def test_script_without_evaluate_among_others_that_have_it_holds_nobody_up(tmp_path):
    world = World(tmp_path, wanted=2)

    def script(run, after_step):
        own_loop(run, after_step, gpt.loss_sum if run.worker_id == "rank-0" else None)

    world.script = script
    begun(world, 2)
    world.run()

    assert (world.coordinator.committed, world.coordinator.missing) == (3, [])


def refused(world, script):
    world.script = script
    begun(world, 1)
    with pytest.raises(ConfigError) as caught:
        world.run()
    return str(caught.value)


def test_optimizer_of_a_script_is_refused_by_name(tmp_path):
    def script(run, _):
        model = models.build(run.manifest.model.definition)
        run.load(model, torch.optim.SGD(model.parameters(), lr=1.0))

    assert "the optimizer is the run's" in refused(World(tmp_path, wanted=1), script)


def test_batch_without_a_step_is_refused(tmp_path):
    def script(run, _):
        model = models.hollow(run.manifest.model.definition)
        run.load(model)
        for rows in run.batches(datasets.open_dataset(run.manifest.data.definition)):
            gpt.loss(model, rows).backward()

    assert "run.step(loss=...) must be called" in refused(World(tmp_path, wanted=1), script)


def test_step_without_a_batch_is_refused(tmp_path):
    def script(run, _):
        run.step(loss=1.0)

    assert "once for every batch" in refused(World(tmp_path, wanted=1), script)
