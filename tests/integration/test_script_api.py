"""A run as a training script sees it: load, batches, step, around an ordinary PyTorch loop."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atoll.data import registry as datasets
from atoll.errors import ConfigError, LayoutMismatch, ManifestMismatch
from atoll.island import trainer
from atoll.island.run import Run
from atoll.models.gpt import GPT, GPTConfig
from atoll.simulate import cluster as simulation
from tests import clusters
from tests.tiny import SIZE, TABLE, simulate

Script = Callable[[Run, Callable[[], None]], None]


@pytest.fixture
def run_script(monkeypatch: pytest.MonkeyPatch):
    """Runs a script in place of the built-in trainer, on every island; gives the result."""

    def run(script: Script, islands: int = 2, **changes) -> simulation.Simulated:
        monkeypatch.setattr(
            trainer, "train", lambda run, *, after_step, **_: script(run, after_step)
        )
        return simulate(islands, **changes)

    return run


def data(run: Run):
    return datasets.open_dataset(run.manifest.data.definition)


def parts(run: Run) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A user's own model and optimizer."""
    model = GPT(GPTConfig(**SIZE))
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1.0,  # the run's schedule sets it
        betas=(0.9, 0.95),
    )
    return model, optimizer


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    logits: Tensor = model(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def plain_loop(
    run: Run,
    after_step: Callable[[], None],
    *,
    told: Callable[[Tensor], Tensor | float] = lambda loss: loss,
) -> None:
    """What a user writes; `told` is what the run hears of a loss."""
    model, optimizer = parts(run)
    run.load(model, optimizer)
    for rows in run.batches(data(run)):
        loss = loss_of(model, rows)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss=told(loss))
        after_step()


@pytest.fixture(scope="module")
def built_in() -> simulation.Simulated:
    return simulate()


def test_plain_loop_equals_the_built_in_trainer_bit_for_bit(run_script, built_in):
    assert run_script(plain_loop).digest == built_in.digest


def test_loss_may_be_a_number(run_script, built_in):
    result = run_script(partial(plain_loop, told=Tensor.item))

    assert result.digest == built_in.digest
    assert [r.train_loss for r in result.status.history] == [
        r.train_loss for r in built_in.status.history
    ]


def test_script_that_trains_otherwise_ends_in_other_bits(run_script, built_in):
    """The control: the script's own loop is what is run."""

    def script(run: Run, after_step: Callable[[], None]) -> None:
        model, _ = parts(run)
        run.load(model)
        for rows in run.batches(data(run)):
            loss_of(model, rows).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(0.1 * parameter.grad)
                    parameter.grad = None
            run.step(loss=1.0)
            after_step()

    result = run_script(script)

    assert result.status.state == "finished"
    assert result.digest != built_in.digest


def test_model_holds_the_runs_weights_before_the_first_batch(run_script):
    seen: list[Tensor] = []

    def script(run: Run, after_step: Callable[[], None]) -> None:
        model, _ = parts(run)
        run.load(model)
        for _ in run.batches(data(run)):
            seen.append(torch.cat([p.detach().flatten() for p in model.parameters()]).clone())
            assert run.digest is not None and run.version is not None
            run.step(loss=1.0)
            after_step()

    run_script(script)

    # Nothing trains, so every batch of every island sees version 0.
    assert len(seen) == 12
    assert all(torch.equal(found, seen[0]) for found in seen)


def test_learning_rate_follows_the_runs_tokens(run_script):
    """Not the island's own: a late joiner has the rate of the others."""
    rates: dict[str, list[float]] = {}

    def script(run: Run, after_step: Callable[[], None]) -> None:
        model, optimizer = parts(run)
        run.load(model, optimizer)
        for _ in run.batches(data(run)):
            rates.setdefault(run.worker_id, []).append(optimizer.param_groups[0]["lr"])
            run.step(loss=1.0)
            after_step()

    run_script(
        script,
        **{
            "inner.lr": 1.0,
            "inner.schedule": {"kind": "linear", "total_tokens": 192, "final_fraction": 0.0},
        },
    )

    # 16 tokens a step and island, two islands, two steps a round.
    expected = [1 - 32 * step / 192 for step in range(6)]
    assert rates == {"island-0": pytest.approx(expected), "island-1": pytest.approx(expected)}


def test_batches_are_rows_of_the_dataset(run_script):
    shapes = set()

    def script(run: Run, after_step: Callable[[], None]) -> None:
        model, _ = parts(run)
        run.load(model)
        for rows in run.batches(data(run)):
            shapes.add((tuple(rows.shape), rows.dtype))
            run.step(loss=1.0)
            after_step()

    run_script(script)

    assert shapes == {((2, 9), torch.int64)}


def test_forgotten_step_is_named(run_script):
    def script(run: Run, after_step: Callable[[], None]) -> None:
        model, _ = parts(run)
        run.load(model)
        for _ in run.batches(data(run)):
            after_step()

    with pytest.raises(ConfigError, match=r"run\.step\(loss=\.\.\.\) must be called once"):
        run_script(script)


def test_step_taken_twice_is_named(run_script):
    def script(run: Run, after_step: Callable[[], None]) -> None:
        model, _ = parts(run)
        run.load(model)
        for _ in run.batches(data(run)):
            run.step(loss=1.0)
            run.step(loss=1.0)

    with pytest.raises(ConfigError, match=r"run\.step\(loss=\.\.\.\) is called once"):
        run_script(script)


def test_step_outside_the_loop_is_named(run_script):
    with pytest.raises(ConfigError, match="once for every batch"):
        run_script(lambda run, _: run.step(loss=1.0))


def test_batches_before_load_are_named(run_script):
    with pytest.raises(ConfigError, match=r"run\.load\(model\) must come before"):
        run_script(lambda run, _: next(run.batches(data(run))))


@pytest.mark.parametrize(
    ("size", "tensor"),
    [
        ({**SIZE, "width": 12}, r"tokens\.weight"),
        ({**SIZE, "block": 9}, r"positions\.weight"),
        ({**SIZE, "layers": 2}, r"blocks\.1"),
    ],
)
def test_model_of_another_shape_is_refused_by_the_tensors_name(run_script, size, tensor):
    with pytest.raises(LayoutMismatch, match=tensor):
        run_script(lambda run, _: run.load(GPT(GPTConfig(**size))))


def test_model_of_another_precision_is_refused(run_script):
    with pytest.raises((ConfigError, LayoutMismatch), match=r"tokens\.weight"):
        run_script(lambda run, _: run.load(GPT(GPTConfig(**SIZE)).to(torch.bfloat16)))


def test_refused_model_keeps_its_own_weights(run_script):
    model = GPT(GPTConfig(**{**SIZE, "width": 12}))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    with pytest.raises(LayoutMismatch):
        run_script(lambda run, _: run.load(model))

    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_other_data_than_the_runs_is_refused(run_script):
    def script(run: Run, _: Callable[[], None]) -> None:
        run.load(parts(run)[0])
        other = datasets.open_dataset({**run.manifest.data.definition, "rows": 501})
        next(run.batches(other))

    with pytest.raises(ManifestMismatch, match=r"data\.rows"):
        run_script(script)


def test_settings_are_the_coordinators(run_script):
    """Each island runs under what the coordinator states, and has nothing to override it with."""
    seen = []

    def script(run: Run, after_step: Callable[[], None]) -> None:
        seen.append(run.manifest)
        plain_loop(run, after_step)

    run_script(script)

    assert [m.sync_every for m in seen] == [2, 2]
    assert seen[0] == seen[1]
    assert seen[0].settings_authority == "server"


def test_script_that_leaves_early_lets_the_others_finish(run_script):
    """It deregisters, and the round no longer waits for it."""

    def script(run: Run, after_step: Callable[[], None]) -> None:
        model, _ = parts(run)
        run.load(model)
        for count, _ in enumerate(run.batches(data(run))):
            if run.worker_id == "island-2" and count == 2:
                run.close()
                return
            run.step(loss=1.0)
            after_step()

    result = run_script(script, 3)

    assert result.status.version == 3
    assert [r.contributions for r in result.status.history] == [0, 2, 3, 2]


def test_table_of_the_tests_is_that_of_the_simulation():
    assert clusters.run_file(TABLE).model == {"architecture": "gpt", **SIZE}
