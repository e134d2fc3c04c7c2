"""A whole run in one process on a virtual clock: exact, isolated, and it says when it is stuck."""

from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.coordinator.rounds import evaluation
from atoll.data import registry as datasets
from atoll.errors import AtollError, ConfigError, NotFinite, WrongRound
from atoll.island import inner_optimizer, presence, trainer
from atoll.models import gpt
from atoll.models import registry as models
from atoll.simulate import cluster as simulation
from atoll.simulate.cluster import Outage, Simulated
from atoll.simulate.fibers import Stopped
from atoll.strategies.diloco.sync import Sync
from tests import clusters
from tests.links import LateReceipts, SlowLink
from tests.tiny import ROUNDS, TABLE, simulate

DIVERGING: dict[str, Any] = {"inner.lr": 1e30, "inner.optimizer": "sgd", "inner.clip": 0.0}
STUCK: dict[str, Any] = {"heartbeat_timeout": 3.0, "evaluate.every": 0}
FEW: dict[str, Any] = {"stop.rounds": 1, "sync_every": 4, "evaluate.every": 0}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("simulated")


@pytest.fixture(scope="module")
def once(home: Path) -> Simulated:
    return simulate(directory=home)


def test_two_simulations_end_in_the_same_bits(once):
    again = simulate()

    assert (again.digest, again.published_digest) == (once.digest, once.published_digest)
    assert again.virtual_seconds == once.virtual_seconds


@pytest.mark.parametrize("link", [SlowLink, LateReceipts])
def test_bits_do_not_depend_on_the_link(monkeypatch, link):
    """Three islands: of two, sums are the same whoever comes first."""
    patient: dict[str, Any] = {
        "heartbeat_timeout": 1000.0,
        "membership.min_workers": 3,
        "upload.codec": "int8",
    }
    calm = simulate(3, **patient)
    monkeypatch.setattr(simulation, "MemoryLink", link)

    slow = simulate(3, **patient)

    assert slow.virtual_seconds > 2 * calm.virtual_seconds
    assert (slow.digest, slow.published_digest) == (calm.digest, calm.published_digest)


@pytest.mark.parametrize("changes", [{"seed": 4}, {"upload.codec": "fp32"}])
def test_another_setting_ends_in_other_bits(once, changes):
    """The control: the digest is not a constant."""
    assert simulate(**changes).digest != once.digest


def test_simulation_trains(once):
    losses = [r.evaluation_loss for r in once.status.history]

    assert len(losses) == ROUNDS + 1
    assert all(loss is not None for loss in losses)
    assert losses[-1] < losses[0]


def test_simulation_counts_its_rounds_and_tokens(once):
    assert once.status.state == "finished"
    assert once.status.version == ROUNDS
    assert once.status.tokens == ROUNDS * 2 * 2 * 2 * 8
    # Of the island that hears from the other's leave at its own next message.
    assert once.status.refusals.keys() <= {"STALE_GENERATION"}


def test_simulated_run_passes_its_audit(once, home):
    report, _ = clusters.audited(home)

    assert report.clean
    assert report.digest == once.digest


def test_simulation_opened_again_after_its_end_is_still_there(once, home):
    assert simulate(directory=home).digest == once.digest


def test_rounds_of_the_command_line_end_the_run():
    file = clusters.run_file(TABLE)

    result = simulation.simulate(file, islands=2, rounds=1)

    assert result.status.version == 1


AWAY_SECONDS = 60.0


@pytest.mark.parametrize("version", range(1, ROUNDS))
def test_islands_wait_for_a_coordinator_that_is_away_and_lose_nothing(once, version):
    """Killed with its memory and started again a minute later: the bits are the calm run's."""
    away = simulation.simulate(
        clusters.run_file(TABLE), islands=2, outage=Outage(version, AWAY_SECONDS)
    )

    assert (away.digest, away.published_digest) == (once.digest, once.published_digest)
    assert away.virtual_seconds >= once.virtual_seconds + AWAY_SECONDS
    assert [w.incarnation for w in away.status.workers] == [1, 1]


def _killed_in_its_first_step(run: Any, *, after_step: Any, **options: Any) -> None:
    def after() -> None:
        after_step()
        if run.worker_id == "island-1":
            raise Stopped

    _train(run, after_step=after, **options)


_train = trainer.train
ONE_MAY_DIE: dict[str, Any] = {"membership.min_workers": 1, "stop.rounds": 2}


def test_killed_island_is_missed_long_before_the_heartbeat_timeout(monkeypatch):
    """A killed fiber drops its presence, as a killed process does."""
    monkeypatch.setattr(trainer, "train", _killed_in_its_first_step)

    result = simulate(**ONE_MAY_DIE)

    assert result.status.version == 2
    assert [w.live for w in result.status.workers] == [False, False]
    assert result.virtual_seconds < 4.0


def test_killed_island_without_presence_is_missed_at_the_heartbeat_timeout(monkeypatch):
    """The control: the other detector alone takes its 10 s."""
    monkeypatch.setattr(trainer, "train", _killed_in_its_first_step)
    monkeypatch.setattr(presence.Attending, "once", lambda _: 1000.0)

    result = simulate(**ONE_MAY_DIE)

    assert result.status.version == 2
    assert result.virtual_seconds > 10.0


def test_progress_is_told_after_every_round():
    seen = []

    simulation.simulate(
        clusters.run_file(TABLE), islands=2, progress=lambda status: seen.append(status.version)
    )

    assert seen == [1, 2, 3]


@pytest.mark.parametrize("islands", [1, 3])
def test_any_number_of_islands_is_simulated(islands):
    changes: dict[str, Any] = {"membership.min_workers": islands, "stop.rounds": 1}

    result = simulate(islands, **changes)

    assert result.status.tokens == islands * 32


def _drawing_trainer(run, *, after_step, **_) -> None:
    """The built-in loop, but with a seeded noise in each step, as dropout has it."""
    model = models.build(run.manifest.model.definition)
    optimizer = inner_optimizer.build_optimizer(model, run.manifest.inner)
    run.load(model, optimizer)
    for rows in run.batches(datasets.open_dataset(run.manifest.data.definition)):
        optimizer.zero_grad()
        loss = gpt.loss(model, rows) * (1 + torch.rand(()))
        loss.backward()
        optimizer.step()
        run.step(loss=loss)
        after_step()


@pytest.mark.parametrize("seconds", [0.0, 1.7])
def test_random_numbers_of_an_island_do_not_depend_on_the_others_turns(monkeypatch, seconds):
    """However the steps of the islands interleave, each draws what it would draw alone."""
    monkeypatch.setattr(trainer, "train", _drawing_trainer)
    expected = simulate(**FEW).digest
    steps = iter([seconds, 0.1] * 1000)
    monkeypatch.setattr(
        simulation.SimulatedCluster,
        "_after_step",
        lambda self, _: self.scheduler.sleep(next(steps)),
    )

    assert simulate(**FEW).digest == expected


def test_random_numbers_of_islands_matter(monkeypatch, once):
    """The control of the claim above."""
    monkeypatch.setattr(trainer, "train", _drawing_trainer)

    assert simulate().digest != once.digest


def test_island_whose_evaluation_is_refused_trains_on(monkeypatch, once):
    """A figure less, and the same bits."""

    def refuse(*_: object) -> None:
        raise WrongRound("not asked for")

    monkeypatch.setattr(evaluation.Evaluation, "take", refuse)

    found = simulate()

    assert found.digest == once.digest
    assert found.status.refusals["WRONG_ROUND"] > 0
    assert {r.evaluation_loss for r in found.status.history} == {None}


def test_error_in_an_island_ends_the_simulation():
    """An island that diverges is refused, and the run says why."""
    with pytest.raises(NotFinite):
        simulate(**DIVERGING)


def test_stuck_simulation_is_found(monkeypatch):
    monkeypatch.setattr(Sync, "is_due", lambda *_, **__: False)

    with pytest.raises(AtollError, match="stuck: no step and no closed round") as stuck:
        simulate(**STUCK)

    assert "live islands ['island-0', 'island-1']" in str(stuck.value)


def test_simulation_with_fewer_islands_than_a_round_needs_is_refused():
    """It would wait for ever for workers that never come."""
    with pytest.raises(ConfigError, match=r"islands=1 is below membership\.min_workers=2"):
        simulate(1)


def test_simulation_gives_the_threads_back():
    torch.set_num_threads(2)

    simulate(**FEW)

    assert torch.get_num_threads() == 2


def test_simulation_without_a_directory_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    simulate(**FEW)

    assert list(tmp_path.iterdir()) == []
