"""Runs whose model is a transformers config or the workers' own code, in one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from atoll import config
from atoll.blobs.directory import DirectoryBlobs
from atoll.clock import ManualClock
from atoll.coordinator import boot
from atoll.coordinator.rounds.spool import Spool
from atoll.coordinator.stores import Stores
from atoll.data import registry as datasets
from atoll.errors import ConfigError, LayoutMismatch
from atoll.island import trainer
from atoll.island.run import Run
from atoll.ledger import engines
from atoll.proof import export
from atoll.simulate import cluster as simulation
from atoll.versions import recorded
from tests.clusters import audited
from tests.ledgers import alone
from tests.tiny import simulate

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 16,
    "max_position_embeddings": 8,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "vocab_size": 16,
    "n_positions": 8,
}
CONFIGS = {"llama": LLAMA, "tied llama": {**LLAMA, "tie_word_embeddings": True}, "gpt2": GPT2}
ONE_ROUND: dict[str, Any] = {"stop.rounds": 1, "sync_every": 4}
OWN_TENSORS = [["embed.weight", "float32", [16, 8]], ["head.weight", "float32", [16, 8]]]

Own = Callable[[], nn.Module]


class OwnModel(nn.Module):
    """A worker's own code."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.head = nn.Linear(width, 16, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.embed(tokens)))
        return logits


class OwnModelInAnotherOrder(OwnModel):
    def __init__(self) -> None:
        super().__init__()
        self.head = self._modules.pop("head")  # type: ignore[assignment] # now the last again
        self.embed = self._modules.pop("embed")  # type: ignore[assignment] # and now it is not


def transformers_model(config: dict[str, Any]) -> dict[str, Any]:
    return {"architecture": "transformers", "config": config}


def custom_model(**changes: Any) -> dict[str, Any]:
    return {"architecture": "custom", "tensors": OWN_TENSORS, **changes}


def losses(result: simulation.Simulated) -> list[float]:
    """The held-out loss of every version."""
    found = [entry.evaluation_loss for entry in result.status.history]
    return [loss for loss in found if loss is not None]


def exported(home: Path, path: Path) -> dict[str, Tensor]:
    """The weights that export writes."""
    ledger = engines.open_ledger(home / "ledger.sqlite")
    manifest = recorded.manifest_of(ledger)
    assert manifest is not None
    export.export(
        ledger,
        DirectoryBlobs(home / "blobs"),
        path,
        layout=recorded.layout_of(manifest),
    )
    ledger.close()
    return load_file(str(path))


@pytest.fixture
def own_code(monkeypatch: pytest.MonkeyPatch):
    """Lets every island of a simulation train a model of its own code."""
    train = trainer.train

    def use(make: Own) -> None:
        monkeypatch.setattr(
            trainer, "train", lambda run, **options: train(run, model=make(), **options)
        )

    return use


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_transformers_config_trains_and_its_audit_is_clean(config, tmp_path):
    result = simulate(directory=tmp_path, model=transformers_model(config), **ONE_ROUND)

    report, manifest = audited(tmp_path)
    assert report.clean
    assert report.digest == result.digest
    assert manifest.model.definition["version"] == transformers.__version__
    first, last = losses(result)
    assert last < first


@pytest.mark.parametrize(
    "model",
    [
        transformers_model({**LLAMA, "max_position_embeddings": 7}),
        transformers_model({**GPT2, "n_positions": 7}),
        {"architecture": "gpt", "vocab": 16, "block": 7, "layers": 1, "heads": 2, "width": 8},
    ],
    ids=["llama", "gpt2", "gpt"],
)
def test_rows_longer_than_the_models_positions_are_refused_before_a_run_begins(model):
    with pytest.raises(ConfigError, match=r"data\.block=8 is longer than the 7 tokens"):
        simulate(model=model, **ONE_ROUND)


def test_two_runs_of_a_config_end_in_the_same_bits_and_another_seed_in_others():
    changes = {"model": transformers_model(GPT2), **ONE_ROUND}

    first, again, other = (simulate(**changes, seed=seed) for seed in (3, 3, 4))

    assert first.digest == again.digest != other.digest


def test_export_of_a_config_loads_in_transformers(tmp_path):
    tied = CONFIGS["tied llama"]
    simulate(directory=tmp_path, model=transformers_model(tied), **ONE_ROUND)

    weights = exported(tmp_path, tmp_path / "w.safetensors")

    settings = {key: value for key, value in tied.items() if key != "model_type"}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    missing = model.load_state_dict(weights, strict=False)
    assert missing.missing_keys == ["lm_head.weight"]  # tied to the embedding, which is there
    assert missing.unexpected_keys == []


def test_config_starts_from_a_file(tmp_path):
    source = tmp_path / "start.safetensors"
    simulate(directory=tmp_path / "a", model=transformers_model(GPT2), **ONE_ROUND)
    weights = exported(tmp_path / "a", source)

    model = {**transformers_model(GPT2), "start_from": str(source)}
    simulate(directory=tmp_path / "b", model=model, **ONE_ROUND)

    _, manifest = audited(tmp_path / "b")
    ended, _ = audited(tmp_path / "a")
    assert manifest.model.initial_digest == ended.digest
    assert "start_from" not in manifest.model.definition
    assert weights


def test_custom_model_trains_and_its_audit_is_clean(own_code, tmp_path):
    own_code(OwnModel)

    result = simulate(directory=tmp_path, model=custom_model(), **ONE_ROUND)

    report, _ = audited(tmp_path)
    assert report.clean
    assert report.digest == result.digest
    first, last = losses(result)
    assert last < first


def test_parameters_of_own_code_are_placed_by_name_in_any_order(own_code):
    own_code(OwnModel)
    expected = simulate(model=custom_model(), **ONE_ROUND).digest
    assert [*dict(OwnModelInAnotherOrder().named_parameters())] == ["head.weight", "embed.weight"]

    own_code(OwnModelInAnotherOrder)

    assert simulate(model=custom_model(), **ONE_ROUND).digest == expected


@pytest.mark.parametrize("key", ["start_from", "fingerprint_of"])
def test_custom_model_takes_names_and_shapes_from_a_file(own_code, tmp_path, key):
    own_code(OwnModel)
    source = tmp_path / "w.safetensors"
    save_file({name: p.detach() for name, p in OwnModel().named_parameters()}, str(source))
    model = {"architecture": "custom", key: str(source)}

    simulate(directory=tmp_path / "run", model=model, **ONE_ROUND)

    report, manifest = audited(tmp_path / "run")
    assert report.clean
    assert manifest.model.definition == custom_model()


def test_restart_of_a_custom_run_does_not_need_the_file_again(own_code, tmp_path):
    own_code(OwnModel)
    source = tmp_path / "w.safetensors"
    save_file({name: p.detach() for name, p in OwnModel().named_parameters()}, str(source))
    model = {"architecture": "custom", "start_from": str(source)}
    first = simulate(directory=tmp_path / "run", model=model, **ONE_ROUND)
    source.unlink()

    assert simulate(directory=tmp_path / "run", model=model, **ONE_ROUND).digest == first.digest


def test_restart_with_another_config_is_refused_with_both(tmp_path):
    simulate(directory=tmp_path, model=transformers_model(LLAMA), **ONE_ROUND)

    with pytest.raises(ConfigError, match=r"model\.definition\.config\.hidden_size: 16 -> 32"):
        simulate(
            directory=tmp_path,
            model=transformers_model({**LLAMA, "hidden_size": 32}),
            **ONE_ROUND,
        )


def test_custom_run_without_own_code_says_what_is_needed():
    with pytest.raises(ConfigError, match=r"--model module:factory.*run\.load\(model\)"):
        simulate(model=custom_model(), **ONE_ROUND)


class Extra(OwnModel):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(2, 2, bias=False)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: OwnModel(12),
            r"has \['embed\.weight', 'float32', \[16, 12\]\] where the run's layout has "
            r"\['embed\.weight', 'float32', \[16, 8\]\]",
        ),
        (
            lambda: OwnModel().bfloat16(),
            r"has \['embed\.weight', 'bfloat16', \[16, 8\]\] where the run's layout has "
            r"\['embed\.weight', 'float32', \[16, 8\]\]",
        ),
        (lambda: nn.Linear(8, 16), r"no parameter 'embed\.weight' where the run's layout has"),
        (Extra, r"has \['more\.weight', 'float32', \[2, 2\]\], which the run's layout lacks"),
        (lambda: OwnModel().to("meta"), r"'embed\.weight' is on the meta device"),
    ],
)
def test_wrong_own_code_is_refused_by_the_first_differing_tensor(own_code, make, reason, tmp_path):
    own_code(make)

    with pytest.raises((LayoutMismatch, ConfigError), match=reason):
        simulate(directory=tmp_path, model=custom_model(), **ONE_ROUND)

    ledger = engines.open_ledger(tmp_path / "ledger.sqlite")
    assert alone(ledger).members.workers() == []  # the coordinator never heard of it
    assert alone(ledger).rounds.all() == []
    ledger.close()


def test_own_code_may_stand_in_for_a_config_it_equals(own_code):
    settings = {key: value for key, value in LLAMA.items() if key != "model_type"}
    changes = {"model": transformers_model(LLAMA), **ONE_ROUND}
    expected = simulate(**changes).digest

    own_code(
        lambda: transformers.AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(**settings), attn_implementation="sdpa"
        )
    )

    assert simulate(**changes).digest == expected


def test_model_that_returns_no_logits_is_named(own_code):
    class Silent(OwnModel):
        def forward(self, tokens: Tensor) -> Any:
            return {"loss": tokens.sum()}

    own_code(Silent)

    with pytest.raises(ConfigError, match="returned 'dict'; model\\(tokens\\) must return logits"):
        simulate(model=custom_model(), **ONE_ROUND)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"architecture": "custom"}, r"model\.tensors must list .*fingerprint_of"),
        ({"architecture": "custom", "tensors": []}, r"model\.tensors must list"),
        (custom_model(tensors=[["a", "float32"]]), r"a row is \[name, dtype, \[shape\]\]"),
        (custom_model(tensors=["a"]), "a row is"),
        (custom_model(tensors=[[1, "float32", [1]]]), "holds the name 1"),
        (custom_model(tensors=[["", "float32", [1]]]), "holds the name ''"),
        (custom_model(tensors=[["a" * 513, "float32", [1]]]), "1 to 512 characters"),
        (custom_model(tensors=[["a", "int8", [1]]]), r"dtype 'int8' for 'a'"),
        (custom_model(tensors=[["a", "float32", [0]]]), r"shape \[0\] for 'a'"),
        (custom_model(tensors=[["a", "float32", [True]]]), r"shape \[True\] for 'a'"),
        (custom_model(tensors=[["a", "float32", 3]]), r"shape 3 for 'a'"),
        (custom_model(tensors=[["a", "float32", [1 << 30, 1 << 30]]]), r"parameters at 'a'"),
        (custom_model(tensors=[["a", "float32", [1]]] * 2), "listed twice"),
        (custom_model(code="x:y"), r"model\.code is not a setting of architecture 'custom'"),
        ({"architecture": "custom", "start_from": "none.safetensors"}, "cannot read the names"),
    ],
    ids=lambda value: str(value)[:48],
)
def test_hostile_custom_definition_is_refused_by_name(model, reason, tmp_path):
    stores = Stores(
        engines.open_ledger(":memory:"),
        DirectoryBlobs(tmp_path / "blobs"),
        Spool(tmp_path / "spool"),
    )
    table = {
        "name": "hostile",
        "sync_every": 1,
        "stop": {"rounds": 1},
        "model": model,
        "data": {"kind": "synthetic", "seed": 1, "rows": 50, "held_out_rows": 4, "block": 8},
    }

    with pytest.raises((ConfigError, LayoutMismatch), match=reason):
        boot.create_or_check(
            stores, config.parse(table, base=tmp_path), ManualClock(), new_run_id="hostile"
        )

    assert alone(stores.ledger).run.get() is None
    stores.ledger.close()
    stores.blobs.close()


def test_script_loads_its_own_model(monkeypatch):
    seen = []

    def script(run: Run, *, after_step: Callable[[], None], **_: Any) -> None:
        run.load(OwnModelInAnotherOrder())
        for _rows in run.batches(datasets.open_dataset(run.manifest.data.definition)):
            seen.append(run.version)
            run.step(loss=1.0)
            after_step()

    monkeypatch.setattr(trainer, "train", script)

    simulate(model=custom_model(), **ONE_ROUND)

    assert set(seen) == {0}
