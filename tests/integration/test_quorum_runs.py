"""Runs that commit by quorum, in one process with the real coordinator: late ranks block nobody.

What is recorded of late ranks is compared with who was made late, and the weights with a calm
training by collectives in which these ranks count as none (`lineage`).
"""

from contextlib import closing
from typing import Any

import pytest

from atoll.coordinator.rounds.dispatch import Dispatch
from atoll.data import numbered
from atoll.errors import AtollError
from atoll.island.sharded.training import Training
from atoll.ledger.records import LeaseState
from atoll.proof import audit as auditing
from atoll.simulate import cluster, lineage
from atoll.simulate.coordinator import stores_in
from atoll.strategies import registry
from atoll.versions import recorded
from tests import clusters
from tests.integration.test_sharded_simulation import TABLE, Watched

DEADLINE = 5.0
QUORUM = {
    "sharded.commit": "quorum",
    "sharded.exchange": "direct",
    "sharded.deadline_seconds": DEADLINE,
    # A rank that is late is alive, and is to be told from a dead one by nothing else.
    "heartbeat_timeout": 2.0,
}
ROUND_STEPS = 4
BATCH = 7


class Lateness(Watched):
    """A run in which islands are late in some steps, by their clocks.

    `late` says in which, by island; an island is late by more than the deadline.
    """

    def __init__(self, home, late=None, *, seconds=DEADLINE + 1, **changes):
        super().__init__(home, **{**QUORUM, **changes})
        self._late = {(index, step) for index, steps in (late or {}).items() for step in steps}
        self._seconds = seconds

    def _delay_of(self, index):
        step = self.step_of(index)
        if (index, step) not in self._late:
            return 0.0
        self._late.discard((index, step))  # made again, it is in time
        return self._seconds

    def step_of(self, index):
        """That an island computes now; 0 outside of a group."""
        run: Any = self.runs.get(f"island-{index}")
        rank = getattr(getattr(run, "_training", None), "_rank", None)
        return 0 if rank is None else rank.owner.present

    def has_parts(self, round_number):
        """Whether some rank has handed in its part of a round."""
        if self.coordinator.is_away:
            return False
        with self.coordinator.now.ledger.reading() as t:
            found = t.checkpoints.every_part()
        return any(part.round == round_number for part in found)


class Found:
    """What a run has recorded."""

    def __init__(self, home):
        stores = stores_in(home)
        with closing(stores.ledger), closing(stores.blobs):
            manifest = recorded.manifest_of(stores.ledger)
            assert manifest is not None
            layout = recorded.layout_of(manifest)
            self.report = auditing.audit(stores.ledger, stores.blobs, layout=layout)
            with stores.ledger.reading() as t:
                self.checkpoints = t.checkpoints.all()
                self.groups = t.groups.all()
                self.evaluated = t.evaluations.all()
                rounds = [r.round for r in t.rounds.all()]
                self.leases = {n: t.leases.of_round(n) for n in rounds}
            self.strategy = registry.sharded(manifest)
            self.again = lineage.retrained(stores.ledger)

    @property
    def late(self):
        return [one for checkpoint in self.checkpoints for one in checkpoint.late]

    def rows_of(self, late):
        """The rows of one late rank, as its round leased them."""
        number = self.strategy.round_of(late[0])
        given = numbered.joined(lease.row_range for lease in self.leases[number])
        return numbered.picked(given, self.strategy.late_rows([late]))

    def rounds_with(self, rows):
        """In which rounds these rows are done."""
        done = [
            (number, lease.row_range)
            for number, leases in self.leases.items()
            for lease in leases
            if lease.state is LeaseState.DONE
        ]
        return [
            [n for n, span in done if span.start <= row < span.stop]
            for part in rows
            for row in range(part.start, part.stop)
        ]


def test_without_a_late_rank_the_weights_are_those_of_strict(tmp_path):
    table = {**TABLE, "stop.rounds": 2}
    strict = cluster.simulate(clusters.run_file(table), islands=3, directory=tmp_path / "a")

    run_file = clusters.run_file({**table, **QUORUM})
    found = cluster.simulate(run_file, islands=3, directory=tmp_path / "b")

    assert found.digest == strict.digest
    assert found.status.tokens == strict.status.tokens
    assert [h.train_loss for h in found.status.history] == [
        h.train_loss for h in strict.status.history
    ]
    assert Found(tmp_path / "b").late == []


def test_rows_of_late_ranks_are_open_again_and_trained_later(tmp_path):
    world = Lateness(tmp_path, {2: [6, 10], 1: [7]}, **{"stop.rounds": 5})
    result = world.finished(3)

    found = Found(tmp_path)
    assert found.late == [(6, 2, 3), (7, 1, 3), (10, 2, 3)]
    assert found.report.clean, found.report.problems
    assert [len(group.members) for group in found.groups] == [2, 3]  # the third came later
    assert result.digest == found.again
    # 7 rows of 3 ranks: 2, 2 and 3.
    assert [sum(map(len, found.rows_of(one))) for one in found.late] == [3, 2, 3]
    assert [c.rows for c in found.checkpoints] == [28, 28 - 5, 28 - 3, 28, 28]
    assert found.report.tokens == (5 * 28 - 8) * 8
    assert result.status.tokens == found.report.tokens
    told = {w.worker_id: w.telemetry.late_steps for w in result.status.workers}
    assert told == {"island-0": 0, "island-1": 1, "island-2": 2}
    # A round is planned when that before the last is committed: two later at the earliest.
    for one, number in zip(found.late, (4, 4, 5), strict=True):
        assert found.rounds_with(found.rows_of(one)) == [[number]] * sum(
            map(len, found.rows_of(one))
        )


def test_late_rank_blocks_nobody_and_comes_to_the_end_of_every_round(tmp_path):
    """Late for two steps, between the halves of one; then in the last one of a round."""
    changes = {"sharded.micro_batches": 2, "stop.rounds": 3}
    late = {2: [6], 1: [12]}
    world = Lateness(tmp_path, late, seconds=2 * DEADLINE + 1, **changes)
    result = world.finished(3)

    found = Found(tmp_path)
    assert found.late == [(6, 2, 3), (7, 2, 3), (12, 1, 3)]
    assert found.report.clean, found.report.problems
    assert result.digest == found.again
    # All held-out rows are in every loss: 4 of 8 tokens.
    tokens = {n: sum(e.tokens for e in found.evaluated if e.version == n) for n in (1, 2, 3)}
    assert tokens == dict.fromkeys((1, 2, 3), 4 * 8)


def killed_after_lateness(home):
    """Rank 2 is late in step 7, which is saved with step 8; rank 1 in step 9, which is not."""
    changes = {"sharded.checkpoint_every": 3, "stop.rounds": 4}
    world = Lateness(home, {2: [7], 1: [9]}, **changes)
    saved: list[int] = []

    def kill():
        saved.append(world.consistent())
        world.kill(3)

    world.later(lambda: world.step_of(0) == 10, kill)
    result = world.finished(4)
    assert saved == [8]
    return result


def test_rows_of_late_ranks_stay_open_when_a_group_goes_back_to_a_save(tmp_path):
    result = killed_after_lateness(tmp_path)

    found = Found(tmp_path)
    assert [(len(group.members), group.step) for group in found.groups][-2:] == [(4, 6), (3, 8)]
    assert found.late == [(7, 2, 4)]  # and step 9 was made again, with all
    assert found.report.clean, found.report.problems
    assert result.digest == found.again
    assert found.rounds_with(found.rows_of((7, 2, 4))) == [[4]] * 2


def test_control_late_ranks_forgotten_with_a_restore_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(Training, "_late_of", lambda *_: ())
    monkeypatch.setattr(cluster, "STUCK_SECONDS", 0.0)  # on top of all that may be waited for

    with pytest.raises(AtollError, match="stuck"):  # no part with such a count is taken
        killed_after_lateness(tmp_path)


def test_control_rows_of_late_ranks_that_are_done_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(Dispatch, "split", lambda _, lease, *__: [lease])
    Lateness(tmp_path, {2: [6]}, **{"stop.rounds": 2}).finished(3)

    [problem] = Found(tmp_path).report.problems
    assert (problem.round, problem.what) == (2, "rows of late ranks")
    assert "3 of theirs are done" in problem.detail


def test_coordinator_that_is_killed_learns_of_late_ranks_again(tmp_path):
    """It dies while they are late, and when some parts of the checkpoint are in."""
    late = {2: [6], 1: [8]}
    world = Lateness(tmp_path, late)
    world.later(lambda: world.step_of(2) == 7, lambda: world.coordinator.go_away(3.0))
    world.later(lambda: world.has_parts(2), lambda: world.coordinator.go_away(1.0))
    result = world.finished(3)

    found = Found(tmp_path)
    assert found.late == [(6, 2, 3), (8, 1, 3)]
    assert [len(group.members) for group in found.groups] == [2, 3]
    assert found.report.clean, found.report.problems
    assert result.digest == found.again


def test_rank_that_does_not_come_to_the_end_of_a_round_is_left_behind(tmp_path):
    world = Lateness(tmp_path, {2: [8]}, seconds=12 * DEADLINE, **{"stop.rounds": 3})
    result = world.finished(3)

    found = Found(tmp_path)
    sizes = [len(group.members) for group in found.groups]
    assert sizes[:3] == [2, 3, 2]
    assert found.report.clean, found.report.problems
    assert result.digest == found.again


def test_too_few_in_time_are_missing_by_name_and_nothing_is_filled_in(tmp_path):
    """Two of three are late where two are needed: the group is over, and its step made again."""
    world = Lateness(tmp_path, {1: [7], 2: [7]}, **{"stop.rounds": 3})
    result = world.finished(3)

    found = Found(tmp_path)
    assert found.late == []
    assert len(found.groups) > 2
    assert found.report.clean, found.report.problems
    assert result.digest == found.again


def test_shards_on_disk_make_no_difference(tmp_path):
    late = {1: [6]}
    changes = {"membership.min_workers": 1, "stop.rounds": 2}
    digests = []
    for number, place in enumerate(("none", "disk")):
        world = Lateness(tmp_path / str(number), late, **changes, **{"sharded.offload": place})
        digests.append(world.finished(2).digest)
        assert Found(tmp_path / str(number)).late == [(6, 1, 2)]

    assert digests[0] == digests[1]


def test_tokens_that_end_a_run_are_those_in_the_sums(tmp_path):
    """Without the lateness two rounds would do."""
    changes = {"stop.rounds": 0, "stop.tokens": 2 * 28 * 8}
    world = Lateness(tmp_path, {1: [6]}, **{**changes, "membership.min_workers": 1})
    result = world.finished(2)

    found = Found(tmp_path)
    assert [c.rows for c in found.checkpoints] == [28, 28 - 4, 28]
    assert result.status.state == "finished"
    assert result.status.tokens == (3 * 28 - 4) * 8
    assert found.report.clean, found.report.problems
    assert result.digest == found.again
