"""transformers configs as data: the library's own model, without drawing, and nothing but data."""

import sys
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from atoll.errors import ConfigError, LayoutMismatch
from atoll.models import construction, from_config, gpt, init, registry

SIZE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
    "max_position_embeddings": 32,
}
LLAMA: dict[str, Any] = {"model_type": "llama", **SIZE}
TIED: dict[str, Any] = {**LLAMA, "tie_word_embeddings": True}
SCALED: dict[str, Any] = {
    **LLAMA,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "vocab_size": 32,
    "n_positions": 32,
}
GEMMA: dict[str, Any] = {
    "model_type": "gemma",
    **SIZE,
    "head_dim": 8,
}
CONFIGS = {"llama": LLAMA, "tied llama": TIED, "scaled": SCALED, "gpt2": GPT2, "gemma": GEMMA}
TOKENS = torch.arange(24).view(2, 12)

every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


def definition(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"architecture": "transformers", "config": config, **changes}


def theirs(config: dict[str, Any]) -> nn.Module:
    """The model as a user of transformers makes it, with weights drawn by the library."""
    settings = {key: value for key, value in config.items() if key != "model_type"}
    made = transformers.AutoConfig.for_model(config["model_type"], **settings)
    torch.manual_seed(5)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(
        made, attn_implementation="sdpa"
    )
    return model.eval()


def ours(config: dict[str, Any], weights: nn.Module) -> nn.Module:
    """The model as a worker makes it, filled by name."""
    model = registry.build(definition(config)).eval()
    given = dict(weights.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(given.pop(name))
    assert not given
    return model


@every_config
def test_built_model_gives_the_librarys_logits_bit_for_bit(config):
    expected = theirs(config)
    found = ours(config, expected)

    with torch.no_grad():
        assert torch.equal(found(TOKENS).logits, expected(TOKENS).logits)


@every_config
def test_hollow_model_has_the_librarys_buffers_and_parameters_without_storage(config):
    wanted = theirs(config)

    model = registry.hollow(definition(config))

    assert {p.device.type for p in model.parameters()} == {"meta"}
    found = dict(model.named_buffers())
    assert found.keys() == dict(wanted.named_buffers()).keys()
    assert all(torch.equal(found[name], buffer) for name, buffer in wanted.named_buffers())
    assert registry.layout_of(model) == registry.layout(definition(config))


@every_config
def test_built_model_has_the_librarys_buffers(config):
    """They are no parameters, so nobody sends them: rotary frequencies must be right at once."""
    expected = dict(theirs(config).named_buffers())

    found = dict(registry.build(definition(config)).named_buffers())

    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("config", [LLAMA, SCALED])
def test_rotary_models_have_buffers(config):
    """The control of the claim above: there is something to compare."""
    assert dict(registry.build(definition(config)).named_buffers())


def test_a_wrong_buffer_changes_the_logits():
    """The control of the claim on logits."""
    expected = theirs(LLAMA)
    found = ours(LLAMA, expected)
    buffers = dict(found.named_buffers())
    buffers["model.rotary_emb.inv_freq"].zero_()

    with torch.no_grad():
        assert not torch.equal(found(TOKENS).logits, expected(TOKENS).logits)


@every_config
def test_model_on_meta_has_the_layout_of_the_built_one_and_no_storage(config):
    model = registry.on_meta(definition(config))

    assert all(p.is_meta for p in model.parameters())
    assert registry.layout_of(model) == registry.layout_of(registry.build(definition(config)))


@pytest.mark.parametrize("config", [TIED, GPT2])
def test_tied_weights_stay_one_parameter(config):
    model: Any = registry.build(definition(config))

    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert "lm_head.weight" not in dict(model.named_parameters())


@every_config
def test_building_draws_nothing(config, monkeypatch):
    """No random initialisation on a worker: what fills parameters at random is never reached."""
    state = torch.get_rng_state()
    drawn = []
    monkeypatch.setattr(torch.Tensor, "normal_", lambda tensor, *_, **__: drawn.append(tensor))

    model = registry.build(definition(config))

    assert drawn == []
    assert torch.equal(torch.get_rng_state(), state)
    assert all(not p.any() for p in model.parameters())


def test_initial_weights_are_the_architectures_own():
    layout = registry.layout(definition(GPT2))

    made = dict(init.initial(definition(GPT2), layout, seed=1))

    assert [*made] == [spec.name for spec in layout.tensors]
    assert not made["transformer.h.0.ln_1.bias"].any()
    assert (made["transformer.h.0.ln_1.weight"] == 1).all()
    assert made["transformer.wte.weight"].std().item() == pytest.approx(0.02, rel=0.2)


def test_initial_weights_follow_the_seed_and_leave_the_random_state_alone():
    layout = registry.layout(definition(LLAMA))
    state = torch.get_rng_state()
    first, again, other = (
        dict(init.initial(definition(LLAMA), layout, seed=seed)) for seed in (1, 1, 2)
    )

    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])
    assert torch.equal(torch.get_rng_state(), state)


@every_config
def test_training_loss_depends_on_weights_and_rows_alone(config):
    """gpt2 drops out by default: an island draws nothing at random."""
    model = ours(config, theirs(config)).train()

    assert gpt.loss(model, TOKENS).item() == gpt.loss(model, TOKENS).item()


def test_attention_is_fixed_by_the_definition():
    chosen = [{"attention": "sdpa"}, {"attention": "eager"}, {}]

    models: list[Any] = [registry.build(definition(LLAMA, **given)) for given in chosen]

    # transformers has no other name for it.
    found = [model.config._attn_implementation for model in models]  # noqa: SLF001
    assert found == ["sdpa", "eager", "sdpa"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "evil--x.Y"}}, r"config\.auto_map is refused"),
        ({"trust_remote_code": True}, r"config\.trust_remote_code is refused.*--model"),
        ({"_name_or_path": "someone/model"}, r"config\._name_or_path is refused.*start_from"),
        ({"name_or_path": "x"}, r"config\.name_or_path is refused"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config is refused"),
        ({"torch_dtype": "float16"}, r"torch_dtype is refused.*inner\.precision"),
        ({"dtype": "float16"}, r"config\.dtype is refused"),
        ({"attn_implementation": "flash"}, r"attn_implementation is refused.*model\.attention"),
        ({"_attn_implementation": "kernels"}, r"_attn_implementation is refused"),
        ({"_private": 1}, r"config\._private is private"),
        ({"rope_parameters": {"auto_map": "x"}}, r"rope_parameters\.auto_map is refused"),
        ({"hidden_act": "../../etc/passwd"}, r"hidden_act='../../etc/passwd' must be a plain word"),
        ({"hidden_act": "a/b"}, "plain word"),
        ({"hidden_act": "os:system"}, "plain word"),
        ({"hidden_act": "nonesuch"}, "builds no model"),
        ({"model_type": "../llama"}, r"model_type='../llama' must be a plain word"),
        ({"model_type": "nonesuch"}, "'nonesuch' is not a causal language model"),
        ({"model_type": "vit"}, "'vit' is not a causal language model"),
        ({"model_type": "gemma3"}, "made of several models"),
        ({"model_type": None}, "None is not a causal language model"),
        ({"model_type": 3}, "3 is not a causal language model"),
        ({"widht": 3}, r"config\.widht is not a setting of model_type 'llama'; known: .*'vocab_s"),
        ({"architectures": ["X"]}, r"config\.architectures is not a setting"),
        ({"return_dict": False}, r"config\.return_dict is not a setting"),
        ({"attention_dropout": 0.1}, r"attention_dropout=0\.1 draws at random"),
        ({"hidden_size": "16"}, "builds no model"),
        ({"hidden_size": -16}, "builds no model"),
        ({"hidden_size": 0}, "builds no model|holds|hold elements"),
        ({"num_attention_heads": 0}, "builds no model"),
        ({"rms_norm_eps": float("nan")}, "is no setting"),
        ({"rms_norm_eps": b"x"}, "is no setting"),
        ({"bad key": 1}, "a key is a plain word"),
        ({"rope_parameters": {"a": {"b": {"c": {"d": {}}}}}}, "nested deeper than 4"),
        ({"rope_parameters": [0] * 70_000}, "holds 70000 entries"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_hostile_config_is_refused_by_name(changes, reason):
    with pytest.raises((ConfigError, LayoutMismatch), match=reason):
        registry.layout(definition({**LLAMA, **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": 1 << 38},
        {"hidden_size": 1 << 30},
        {"hidden_size": 1 << 40},
        {"vocab_size": 1 << 80},
        {"num_hidden_layers": 1 << 12, "hidden_size": 1 << 12},
        {"num_hidden_layers": 1 << 53},
        {"num_attention_heads": 1 << 39, "head_dim": 1 << 20},
        {"max_position_embeddings": 1 << 50},
    ],
    ids=str,
)
def test_huge_config_is_refused_before_anything_is_allocated(changes, monkeypatch):
    monkeypatch.setattr(construction, "MAX_TENSORS", 500)  # a billion layers end there, sooner

    with pytest.raises(ConfigError, match=r"make .*smaller|builds no model"):
        registry.build(definition({**LLAMA, **changes}))


@pytest.mark.parametrize("changes", [{"layers": 1 << 60}, {"width": 1 << 40}, {"vocab": 1 << 62}])
def test_huge_built_in_model_is_refused(changes, monkeypatch):
    monkeypatch.setattr(construction, "MAX_TENSORS", 500)
    size = {"vocab": 8, "block": 4, "layers": 1, "heads": 2, "width": 8}

    with pytest.raises(ConfigError, match="smaller"):
        registry.build({"architecture": "gpt", **size, **changes})


def test_limits_do_not_outlive_a_refusal(monkeypatch):
    with monkeypatch.context() as context:
        context.setattr(construction, "MAX_TENSORS", 1)
        with pytest.raises(ConfigError, match="at most 1 tensors"):
            registry.on_meta(definition(LLAMA))
        nn.Linear(2, 2)  # two parameters of somebody else

    registry.on_meta(definition(LLAMA))


def test_large_buffers_are_refused(monkeypatch):
    monkeypatch.setattr(construction, "MAX_BUFFER_ELEMENTS", 3)

    with pytest.raises(
        ConfigError, match=r"buffers hold 4 values at 'model\.rotary_emb\.inv_freq'"
    ):
        registry.on_meta(definition(LLAMA))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention": "flash_attention_2"}, r"model\.attention='flash_attention_2'"),
        ({"attention": None}, r"model\.attention=None"),
        ({"config": None}, r"model\.config=None must be a table"),
        ({"config": "llama"}, r"model\.config='llama' must be a table"),
        ({"revision": "main"}, r"model\.revision is not a setting of architecture 'transformers'"),
    ],
)
def test_hostile_definition_is_refused_by_name(changes, reason):
    with pytest.raises(ConfigError, match=reason):
        registry.layout({**definition(LLAMA), **changes})


def test_model_without_the_asked_attention_says_what_to_set():
    with pytest.raises(ConfigError, match=r"or set model\.attention='eager'"):
        registry.layout(definition({"model_type": "gptj"}))


def test_type_registered_beside_the_library_is_refused(monkeypatch):
    """Another package may have put a class of its own in the place of a known type."""
    beside = type("Config", (transformers.LlamaConfig,), {"__module__": "elsewhere"})
    configs = transformers.models.auto.configuration_auto
    monkeypatch.setattr(configs, "CONFIG_MAPPING", {"llama": beside})

    with pytest.raises(ConfigError, match="only model types of transformers itself"):
        registry.layout(definition(LLAMA))


def test_manifest_records_the_version_that_understands_the_config():
    made = registry.resolved(definition(LLAMA))

    assert made == definition(LLAMA, version=transformers.__version__)
    registry.build(made)


def test_worker_with_another_version_is_refused_with_both():
    other = definition(LLAMA, version="4.0.0")

    with pytest.raises(ConfigError, match=rf"'4\.0\.0' where .*'{transformers.__version__}'"):
        registry.build(other)


def test_missing_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "transformers.models.auto.configuration_auto", None)

    with pytest.raises(ConfigError, match=r"pip install 'atoll\[transformers\]'"):
        registry.layout(definition(LLAMA))


def test_refused_keys_are_no_settings_of_any_type():
    known = from_config.known_settings(transformers.LlamaConfig)

    assert "hidden_size" in known
    assert not known & {*from_config.REFUSED, "return_dict", "architectures"}
