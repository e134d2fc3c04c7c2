"""A streaming run, whole: against plain loops, over slow links and one that stands still."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.data import batches
from atoll.data import registry as datasets
from atoll.island import inner_optimizer, trainer
from atoll.island.conversation.transfers import Transfers
from atoll.island.run import Run
from atoll.launch import state
from atoll.layout import Layout
from atoll.models import gpt
from atoll.models import registry as models
from atoll.proof import export
from atoll.protocol.manifest import Manifest
from atoll.simulate import cluster as simulation
from atoll.simulate.fibers import Scheduler
from atoll.simulate.link import MemoryLink
from atoll.strategies import registry
from atoll.strategies.base import ALL, Fragments, run_layout
from atoll.sums import digest as digests
from atoll.versions import recorded
from tests.ledgers import alone
from tests.links import LateReceipts, SlowLink
from tests.tiny import SIZE, simulate

MODEL = {"architecture": "gpt", **SIZE, "layers": 4}
STREAMING: dict[str, Any] = {
    "model": MODEL,
    "mode": "streaming",
    "sync_every": 6,
    "num_fragments": 3,
    "delay_steps": 3,  # of 2 a round: up to two rounds are in flight
    "local_weight": 0.25,
    "stop.rounds": 11,
    "heartbeat_timeout": 1000.0,
    "evaluate.every": 4,
}


def streamed(**changes: Any) -> simulation.Simulated:
    return simulate(**{**STREAMING, **changes})


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> simulation.Simulated:
    return streamed()


def test_one_fragment_without_delay_is_a_sync_run():
    alike: dict[str, Any] = {"model": MODEL, "sync_every": 2, "stop.rounds": 4}

    stream = simulate(**alike, mode="streaming")

    assert stream.digest == simulate(**alike).digest


@pytest.mark.parametrize(
    "changes",
    [
        {"delay_steps": 4},
        {"local_weight": 0.5},
        {"num_fragments": 2},
        {"fragment_pattern": "sequential"},
    ],
    ids=str,
)
def test_every_setting_of_the_schedule_matters(calm, changes):
    """The control of all that follows."""
    assert streamed(**changes).digest != calm.digest


# Against plain loops


class PlainIsland:
    """One island's training as the paper says it, on its own copy of the model."""

    def __init__(self, manifest: Manifest, layout: Layout, initial: Tensor) -> None:
        self.model = models.build(manifest.model.definition)
        self.local = initial.clone()
        views = layout.views(self.local)
        for name, parameter in self.model.named_parameters():
            parameter.data = views[name]
        self.optimizer = inner_optimizer.build_optimizer(self.model, manifest.inner)

    def step(self, rows: Tensor, clip: float) -> None:
        gpt.loss(self.model, rows).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def plain(directory: Path) -> str:
    """The digest that the run's recorded leases lead to, without a line of Atoll's protocol.

    fp32 both ways and outer SGD with rate 1: a version is the mean of what islands have.
    """
    with state.at_rest(directory) as (ledger, blobs):
        manifest = recorded.manifest_of(ledger)
        assert manifest is not None
        leases = [
            x for r in alone(ledger).rounds.all() for x in alone(ledger).leases.of_round(r.round)
        ]
        strategy = registry.of(manifest)
        layout = run_layout(strategy, models.layout(manifest.model.definition))
        initial = export.version_at(ledger, blobs, layout=layout, version=0)
        published = initial.state.published.clone()
    parts = Fragments.of(strategy, layout)
    count, every, delay = manifest.num_fragments, manifest.sync_every, manifest.delay_steps
    steps, alpha, last = every // count, manifest.local_weight, manifest.stop.rounds
    dataset = datasets.open_dataset(manifest.data.definition)
    islands = [PlainIsland(manifest, layout, published) for _ in range(2)]
    fed: dict[int, Iterator[Tensor]] = {}
    in_flight: dict[int, tuple[int, Tensor]] = {}  # step at which it is merged -> fragment, values

    def merge(number: int, values: Tensor) -> None:
        for island in islands:
            own = parts[number].of(island.local)
            own.copy_(own * alpha + values * (1 - alpha))

    for done in range(last * steps):
        window = done // steps + 1
        for index, island in enumerate(islands):
            if done % steps == 0:
                mine = [
                    x.row_range
                    for x in leases
                    if (x.round, x.worker_id) == (window, f"island-{index}")
                ]
                fed[index] = batches.batches(
                    dataset, mine, batch=manifest.inner.batch, seed=manifest.seed
                )
            island.step(next(fed[index]), manifest.inner.clip)
        now = done + 1
        if now in in_flight:
            merge(*in_flight.pop(now))
        if now % steps == 0:
            number = ALL if window == last else (window - 1) % count
            if number == ALL:
                for at in sorted(in_flight):
                    merge(*in_flight.pop(at))
            base = parts[number].of(published)
            moved = [base - parts[number].of(island.local) for island in islands]
            base.sub_((moved[0] + moved[1]) / 2)
            in_flight[now + delay] = (number, base.clone())
            if not delay:
                merge(*in_flight.pop(now))
    return digests.digest(layout, published).root


@pytest.mark.parametrize(
    ("delay", "alpha", "fragments"),
    [(0, 0.0, 3), (1, 0.0, 3), (3, 0.25, 3), (5, 0.5, 2), (2, 0.5, 1)],
)
def test_streaming_run_ends_in_the_bits_of_plain_loops(tmp_path, delay, alpha, fragments):
    found = simulate(
        directory=tmp_path,
        **{
            **STREAMING,
            "delay_steps": delay,
            "local_weight": alpha,
            "num_fragments": fragments,
            "upload.codec": "fp32",
            "outer.optimizer": "sgd",
            "outer.lr": 1.0,
        },
    )

    assert plain(tmp_path) == found.digest


# Links


@pytest.mark.parametrize("link", [SlowLink, LateReceipts])
def test_bits_do_not_depend_on_the_link(calm, monkeypatch, link):
    monkeypatch.setattr(simulation, "MemoryLink", link)

    slow = streamed()

    assert slow.virtual_seconds > 2 * calm.virtual_seconds
    assert (slow.digest, slow.published_digest) == (calm.digest, calm.published_digest)


STILL_IN, STILL_SECONDS = 4, 20.0


class StillLink(MemoryLink):
    """Nothing gets through for a while, from a moment on."""

    since: float | None = None

    def _pass(self) -> None:
        while StillLink.since is not None and self.clock.now() < StillLink.since + STILL_SECONDS:
            self.clock.sleep(0.05)

    def send(self, *given: Any, **more: Any) -> Any:
        self._pass()
        return super().send(*given, **more)

    def upload(self, *given: Any, **more: Any) -> str:
        self._pass()
        return super().upload(*given, **more)

    def download(self, *given: Any) -> None:
        self._pass()
        super().download(*given)


@pytest.mark.parametrize("delay", [1, 2, 3, 4, 5])
def test_training_makes_so_many_steps_after_a_hand_in_on_a_link_that_stands_still(
    monkeypatch, delay
):
    """Also where versions are evaluated: neither that nor its report waits for the link."""
    settings = {"delay_steps": delay, "evaluate.every": 1}
    undisturbed = streamed(**settings)
    clocks: list[Scheduler] = []
    made: list[bool] = []  # steps of island-0 after the hand-in: whether before the link moved
    later: list[bool] = []  # its hand-ins after that one, likewise
    step, send, spawn = Run.step, Transfers.send, Scheduler.spawn

    def noted(self: Scheduler, *given: Any) -> Any:
        clocks.append(self)
        return spawn(self, *given)

    def stands_still() -> bool:
        return StillLink.since is not None and clocks[0].now() < StillLink.since + STILL_SECONDS

    def handed_over(self: Transfers, given: Any) -> None:
        send(self, given)
        header = given.header
        if header.worker_id == "island-0" and header.round > STILL_IN:
            later.append(stands_still())
        if (header.worker_id, header.round) == ("island-0", STILL_IN):
            StillLink.since = clocks[0].now()

    def counted(self: Run, **told: Any) -> None:
        step(self, **told)
        if self.worker_id == "island-0" and StillLink.since is not None:
            made.append(stands_still())

    monkeypatch.setattr(Scheduler, "spawn", noted)
    monkeypatch.setattr(StillLink, "since", None)
    monkeypatch.setattr(simulation, "MemoryLink", StillLink)
    monkeypatch.setattr(Transfers, "send", handed_over)
    monkeypatch.setattr(Run, "step", counted)

    found = streamed(**settings)

    assert sum(made) == delay
    # A round has two steps: from a delay of three on, several hand-ins are in flight at once.
    assert sum(later) == (delay - 1) // 2
    assert found.digest == undisturbed.digest


def test_trainer_ends_with_the_published_weights(monkeypatch, calm):
    ended: list[str] = []
    train = trainer.train

    def watched(run: Run, **options: Any) -> None:
        train(run, **options)
        ended.append(str(run.digest))

    monkeypatch.setattr(trainer, "train", watched)

    streamed()

    assert ended == [calm.published_digest] * 2


def test_held_out_loss_is_of_the_published_weights(tmp_path):
    """One in four versions and the last, each as a plain loop finds it in what was published."""
    found = streamed(directory=tmp_path)

    losses = {r.round: r.evaluation_loss for r in found.status.history if r.evaluation_loss}

    assert [version // 4 for version in losses] == [0, 1, 2, 2]
    assert {version: pytest.approx(loss) for version, loss in losses.items()} == {
        version: plain_loss(tmp_path, version) for version in losses
    }


def plain_loss(directory: Path, version: int) -> float:
    """The held-out loss of a published version, row by row."""
    with state.at_rest(directory) as (ledger, blobs):
        manifest = recorded.manifest_of(ledger)
        assert manifest is not None
        model = models.build(manifest.model.definition)
        layout = run_layout(registry.of(manifest), models.layout(manifest.model.definition))
        at = export.version_at(ledger, blobs, layout=layout, version=version)
    model.load_state_dict(layout.views(at.state.published))
    dataset = datasets.open_dataset(manifest.data.definition)
    rows = batches.held_out_batches(dataset, range(dataset.held_out_rows), batch=1)
    sums = [gpt.loss_sum(model, row) for row in rows]
    return sum(loss for loss, _ in sums) / sum(count for _, count in sums)
