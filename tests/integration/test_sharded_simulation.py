"""Sharded runs in one process, with the real coordinator: calm ones, and every kind of failure.

What a run with failures ends in is compared with training without any: the same groups, from where
they went back to, and nothing else.
"""

from contextlib import closing

import pytest
from rich.console import Console

from atoll import torch_threads
from atoll.cli import status
from atoll.coordinator.shown import metrics
from atoll.errors import Forbidden
from atoll.ledger import engines
from atoll.proof import audit as auditing
from atoll.simulate import cluster, lineage
from atoll.simulate.cluster import SimulatedCluster
from atoll.simulate.coordinator import stores_in
from atoll.simulate.link import MemoryLink
from atoll.versions import recorded
from tests import clusters, sharded_worlds

ROUNDS = 4
HEARTBEAT_TIMEOUT = 2.0
STEP_SECONDS = 0.6  # a save is known to be consistent before the next step is made
TABLE = {
    **sharded_worlds.TABLE,
    "stop.rounds": ROUNDS,
    "heartbeat_interval": 0.5,
    "heartbeat_timeout": HEARTBEAT_TIMEOUT,
    "membership.min_workers": 2,
}
MOST_SECONDS = HEARTBEAT_TIMEOUT + 10.0  # from a failure to the next step


class Watched(SimulatedCluster):
    """Knows the steps that ranks made, and when."""

    def __init__(self, home, **changes):
        home.mkdir(exist_ok=True)
        super().__init__(clusters.run_file({**TABLE, **changes}), home)
        self.step_seconds = [STEP_SECONDS]
        self.made = []  # when a rank had made a step

    def _after_step(self, seconds):
        self.made.append(self.scheduler.now())
        super()._after_step(seconds)

    def later(self, condition, act):
        def wait():
            while not condition():
                self.scheduler.sleep(0.01)
            act()

        self.scheduler.spawn("nemesis", wait)

    @property
    def groups(self):
        with self.coordinator.now.ledger.reading() as t:
            return t.groups.all()

    def consistent(self):
        return self.coordinator.now.status().consistent

    def is_under_way(self, ranks, *, within_round=False):
        """Whether so many ranks train together and have made a save of their own."""
        if self.coordinator.is_away:
            return False
        group, saved = self.groups[-1:], self.consistent()
        if not group or len(group[0].members) < ranks or group[0].is_over:
            return False
        return saved > group[0].step and (saved % 4 != 0 or not within_round)

    def gap_after(self, moment):
        """Seconds from a moment until a step is made again."""
        return min(when for when in self.made if when > moment + STEP_SECONDS) - moment

    def finished(self, ranks):
        with torch_threads.kept():
            return self.run(ranks, lambda _: None)


def checked(home):
    """The digest of a calm training along the same groups; the records must be sound."""
    stores = stores_in(home)
    with closing(stores.ledger), closing(stores.blobs):
        manifest = recorded.manifest_of(stores.ledger)
        assert manifest is not None
        layout = recorded.layout_of(manifest)
        report = auditing.audit(stores.ledger, stores.blobs, layout=layout, with_replay=False)
        assert report.clean, report.problems
        rows = ROUNDS * manifest.sharded.round_steps * manifest.inner.batch
        assert report.tokens == rows * manifest.data.definition["block"]
        return lineage.retrained(stores.ledger)


@pytest.mark.parametrize("ranks", [2, 4])
def test_simulated_run_is_checkpointed_to_its_end(tmp_path, ranks):
    file = clusters.run_file(TABLE)

    result = cluster.simulate(file, islands=ranks, directory=tmp_path)

    losses = [entry.evaluation_loss or 0.0 for entry in result.status.history]
    assert (result.status.state, result.status.version) == ("finished", ROUNDS)
    assert losses[-1] < losses[0]
    assert result.digest == checked(tmp_path)


def test_lineage_of_another_size_ends_elsewhere(tmp_path):
    """The control of all comparisons below: the number of ranks shows in the bits."""
    file = clusters.run_file(TABLE)

    results = [cluster.simulate(file, islands=n, directory=tmp_path / str(n)) for n in (2, 3)]

    assert results[0].digest != results[1].digest


def test_status_and_metrics_show_where_the_time_of_steps_goes(tmp_path):
    world, found = Watched(tmp_path), []
    world.later(lambda: world.is_under_way(2), lambda: found.append(world.coordinator.now.status()))
    world.finished(2)

    [shown] = found
    console = Console(width=160, record=True)
    console.print(status.view(shown))
    told = shown.workers[0].telemetry
    assert told.compute_seconds > 0.0
    assert told.rank_bytes_sent > 0
    assert "communication" in console.export_text()
    text = metrics.render(shown).decode()
    for name, figure in (
        ("compute_seconds", told.compute_seconds),
        ("rank_sent_bytes", told.rank_bytes_sent),
        ("rolled_back_steps", 0.0),
    ):
        line = next(s for s in text.splitlines() if s.startswith(f"atoll_worker_{name}{{"))
        assert float(line.split()[-1]) == figure


def test_killed_rank_costs_the_steps_since_the_last_save(tmp_path):
    world, moments = Watched(tmp_path), []

    def kill():
        moments.append((world.scheduler.now(), world.consistent()))
        world.kill(2)

    world.later(lambda: world.is_under_way(4), kill)
    result = world.finished(4)

    [(moment, saved)] = moments
    *_, before, after = stored_groups(tmp_path)
    assert (len(before.members), len(after.members)) == (4, 3)
    assert after.step == saved
    assert world.gap_after(moment) < MOST_SECONDS
    assert result.digest == checked(tmp_path)


def test_two_neighbours_killed_go_back_to_the_checkpoint(tmp_path):
    world, moments = Watched(tmp_path), []

    def kill():
        moments.append((world.scheduler.now(), world.consistent()))
        world.kill(1)
        world.kill(2)

    world.later(lambda: world.is_under_way(4, within_round=True), kill)
    result = world.finished(4)

    [(moment, saved)] = moments
    *_, after = stored_groups(tmp_path)
    assert len(after.members) == 2
    assert after.step == saved - 2  # the checkpoint before that save
    assert world.gap_after(moment) < MOST_SECONDS
    assert result.digest == checked(tmp_path)


def test_stopped_rank_is_evicted_and_enters_again_at_a_checkpoint(tmp_path):
    world, moments = Watched(tmp_path, **{"stop.rounds": ROUNDS}), []

    def stop():
        moments.append(world.scheduler.now())
        world.freeze(1)
        world.scheduler.sleep(4.0)
        world.thaw(1)

    world.later(lambda: world.is_under_way(3), stop)
    result = world.finished(3)

    sizes = [len(group.members) for group in stored_groups(tmp_path)]
    assert sizes[sizes.index(3) :][:2] == [3, 2]
    assert world.gap_after(moments[0]) < MOST_SECONDS
    assert result.digest == checked(tmp_path)


def test_killed_coordinator_costs_no_step(tmp_path):
    needs = {"membership.min_workers": 3}
    world = Watched(tmp_path / "a", **needs)
    world.later(lambda: world.is_under_way(3), lambda: world.coordinator.go_away(3.0))

    result = world.finished(3)
    calm = Watched(tmp_path / "b", **needs).finished(3)

    assert len(stored_groups(tmp_path / "a")) == 1
    assert result.digest == calm.digest == checked(tmp_path / "a")


def test_rank_that_joins_enters_at_a_checkpoint(tmp_path):
    world = Watched(tmp_path)
    world.later(lambda: world.is_under_way(2), lambda: world.start(2))

    result = world.finished(2)

    sizes = [(len(group.members), group.step) for group in stored_groups(tmp_path)]
    assert sizes[0] == (2, 0) and sizes[-1][0] == 3
    assert sizes[-1][1] % 4 == 0
    assert result.digest == checked(tmp_path)


def test_below_min_workers_a_replacement_is_waited_for(tmp_path):
    world = Watched(tmp_path)

    def replace():
        world.kill(1)
        world.scheduler.sleep(6.0)
        world.start(2)

    world.later(lambda: world.is_under_way(2), replace)
    result = world.finished(2)

    members = [[m.worker_id for m in group.members] for group in stored_groups(tmp_path)]
    assert members == [["island-0", "island-1"], ["island-0", "island-2"]]
    assert result.digest == checked(tmp_path)


def test_kicked_rank_ends_with_the_operators_word(tmp_path):
    world = Watched(tmp_path)
    world.later(lambda: world.is_under_way(3), lambda: world.coordinator.now.kick("island-2"))

    with pytest.raises(Forbidden, match="'island-2' was taken out of the run"):
        world.finished(3)


def stored_groups(home):
    with closing(engines.open_ledger(home / "ledger.sqlite")) as ledger, ledger.reading() as t:
        return t.groups.all()


def test_twelve_ranks_in_two_regions_form_a_ring_region_by_region(tmp_path):
    """Odd and even ranks are 80 ms apart, so each ring of six is closed but for two borders."""
    changes = {"membership.min_workers": 12, "stop.rounds": 1, "inner.batch": 12}
    far = [[0.0 if (a + b) % 2 == 0 else 0.08 for b in range(12)] for a in range(12)]
    file = clusters.run_file({**TABLE, **changes})

    result = cluster.simulate(file, islands=12, latencies=far, directory=tmp_path / "far")
    near = cluster.simulate(file, islands=12, directory=tmp_path / "near")

    names = [m.worker_id for m in stored_groups(tmp_path / "far")[-1].members]
    regions = [int(name.rpartition("-")[2]) % 2 for name in names]
    assert regions == [0] * 6 + [1] * 6
    assert names[:6] == sorted(names[:6]) and names[6:] == sorted(names[6:])
    assert result.virtual_seconds > near.virtual_seconds + 1.0
    assert result.status.version == 1


def test_death_while_a_round_is_uploaded_goes_back_no_further_than_its_end(tmp_path, monkeypatch):
    """Beyond it nobody could hand that round in, and no later one would ever be recorded."""
    world = Watched(tmp_path)
    killed: list[int] = []
    upload = MemoryLink.upload_part

    def slow(link, identity, part):
        while part.round == 2 and not killed:
            world.scheduler.sleep(0.05)
        upload(link, identity, part)

    def has_saves_of_the_next_round():
        with world.coordinator.now.ledger.reading() as t:
            return len(t.saves.since(9)) >= 3

    def kill():
        killed.append(world.consistent())
        world.kill(2)

    monkeypatch.setattr(MemoryLink, "upload_part", slow)
    world.later(has_saves_of_the_next_round, kill)
    result = world.finished(3)

    assert killed == [8]
    assert checked(tmp_path) == result.status.digest
