import hashlib
import math
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch

from atoll.errors import ConfigError
from atoll.models import gpt, init, registry
from atoll.models.gpt import GPT, GPTConfig

CONFIG = GPTConfig(vocab=11, block=6, layers=2, heads=2, width=8)
DEFINITION = {"architecture": "gpt", **asdict(CONFIG)}


# Bits are promised for one thread.
pytestmark = pytest.mark.usefixtures("one_thread")


def filled(seed=1):
    model = registry.build(DEFINITION)
    model.load_state_dict(dict(init.initial_weights(registry.layout_of(model), seed=seed)))
    return model


def some_rows(count=3, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, CONFIG.vocab, (count, CONFIG.block + 1), generator=generator)


# Architecture


def test_logits_have_one_row_of_vocab_per_token():
    logits = filled()(some_rows()[:, :-1])

    assert logits.shape == (3, CONFIG.block, CONFIG.vocab)


@pytest.mark.parametrize("changed", range(1, CONFIG.block))
def test_later_token_never_changes_earlier_logits(changed):
    model = filled()
    tokens = some_rows()[:, :-1]
    other = tokens.clone()
    other[:, changed] = (other[:, changed] + 1) % CONFIG.vocab

    before, after = model(tokens), model(other)

    assert torch.equal(before[:, :changed], after[:, :changed])


@pytest.mark.parametrize("changed", range(CONFIG.block))
def test_token_changes_the_logits_from_its_place_on(changed):
    model = filled()
    tokens = some_rows()[:, :-1]
    other = tokens.clone()
    other[:, changed] = (other[:, changed] + 1) % CONFIG.vocab

    before, after = model(tokens), model(other)

    assert (before[:, changed:] != after[:, changed:]).any(dim=2).all()


def test_position_matters():
    tokens = torch.full((1, 4), 3)

    logits = filled()(tokens)

    assert not torch.equal(logits[0, 0], logits[0, 1])


def test_shorter_sequence_gives_the_same_logits():
    model = filled()
    tokens = some_rows()[:, :-1]

    short = model(tokens[:, :3])

    # Other shapes may take other kernels; the values are of order 0.1, so 1e-6 is a few eps.
    torch.testing.assert_close(short, model(tokens)[:, :3], rtol=0, atol=1e-6)


def test_longer_sequence_is_refused():
    with pytest.raises(ConfigError, match=r"7 tokens is longer than model\.block=6"):
        filled()(some_rows())


def test_model_has_no_biases_and_no_buffers():
    model = filled()

    assert not [name for name, _ in model.named_parameters() if "bias" in name]
    assert not list(model.named_buffers())


# Loss


def test_loss_of_a_uniform_model_is_the_log_of_vocab():
    model = registry.build(DEFINITION)

    assert gpt.loss(model, some_rows()).item() == pytest.approx(math.log(11), rel=1e-6)


def test_loss_is_the_mean_of_minus_log_probability_of_the_next_token():
    model, rows = filled(), some_rows()

    value = gpt.loss(model, rows).item()

    probabilities = model(rows[:, :-1]).double().softmax(dim=-1)
    expected = -probabilities.gather(2, rows[:, 1:, None]).log().mean().item()
    assert value == pytest.approx(expected, rel=1e-6)


def test_loss_sum_is_the_mean_times_the_tokens_it_reports():
    model, rows = filled(), some_rows()

    total, tokens = gpt.loss_sum(model, rows)

    assert tokens == 18
    assert total / tokens == pytest.approx(gpt.loss(model, rows).item(), rel=1e-6)


def test_loss_sums_of_parts_add_up_to_the_whole():
    model, rows = filled(), some_rows(4)

    parts = gpt.loss_sum(model, rows[:1])[0] + gpt.loss_sum(model, rows[1:])[0]

    assert parts == pytest.approx(gpt.loss_sum(model, rows)[0], rel=1e-6)


def test_loss_sum_builds_no_graph():
    model = filled()

    gpt.loss_sum(model, some_rows())

    assert all(p.grad is None for p in model.parameters())


def test_gradients_match_finite_differences():
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=5, block=3, layers=1, heads=2, width=4)).double()
    rows = torch.tensor([[0, 1, 2, 3], [4, 3, 1, 0]])

    def loss_of(*_parameters):
        # gradcheck nudges the parameters in place.
        return gpt.loss(model, rows)

    assert torch.autograd.gradcheck(loss_of, tuple(model.parameters()))


# Definitions and layout


def test_parameters_keep_their_names_and_shapes():
    layout = registry.layout_of(registry.on_meta(DEFINITION))

    assert layout.digest == GOLDEN_LAYOUT


def test_parameters_of_one_layer_are_the_listed_ones():
    one_layer = registry.on_meta({**DEFINITION, "layers": 1})

    assert [(t.name, t.shape) for t in registry.layout_of(one_layer).tensors] == [
        ("tokens.weight", (11, 8)),
        ("positions.weight", (6, 8)),
        ("blocks.0.attention_norm.weight", (8,)),
        ("blocks.0.attention.qkv.weight", (24, 8)),
        ("blocks.0.attention.project.weight", (8, 8)),
        ("blocks.0.mlp_norm.weight", (8,)),
        ("blocks.0.mlp.expand.weight", (32, 8)),
        ("blocks.0.mlp.project.weight", (8, 32)),
        ("norm.weight", (8,)),
        ("head.weight", (11, 8)),
    ]


def test_model_on_meta_has_no_storage():
    model = registry.on_meta(DEFINITION)

    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_built_model_has_the_layout_of_the_one_on_meta():
    built = registry.layout_of(registry.build(DEFINITION))

    assert built == registry.layout_of(registry.on_meta(DEFINITION))


def test_built_model_starts_at_zero():
    assert all((p == 0).all() for p in registry.build(DEFINITION).parameters())


def test_building_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()

    registry.build(DEFINITION)

    assert torch.equal(torch.get_rng_state(), before)


def test_layout_of_another_precision_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"'tokens\.weight' is torch\.bfloat16"):
        registry.layout_of(filled().bfloat16())


def test_unknown_architecture_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'rnn'.*\['custom', 'gpt', 'transformers'\]"):
        registry.build({"architecture": "rnn"})


def test_unknown_key_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"model\.dropout.*'block', 'heads', 'layers'"):
        registry.build({**DEFINITION, "dropout": 1})


@pytest.mark.parametrize("value", ["8", 8.0, True, None])
def test_value_of_another_type_is_refused_by_name(value):
    with pytest.raises(ConfigError, match=r"model\.width=.* whole number"):
        registry.build({**DEFINITION, "width": value})


@pytest.mark.parametrize("key", ["vocab", "block", "layers", "heads", "width"])
def test_size_below_one_is_refused_by_name(key):
    with pytest.raises(ConfigError, match=rf"model\.{key}=0"):
        registry.build({**DEFINITION, key: 0})


def test_width_that_heads_do_not_divide_is_refused():
    with pytest.raises(ConfigError, match=r"width=8 is not a multiple of model\.heads=3"):
        registry.build({**DEFINITION, "heads": 3})


# Tied


TIED = {**DEFINITION, "tied": True}


@pytest.mark.parametrize("made", [registry.build, registry.on_meta, registry.hollow])
def test_tied_head_has_the_weight_of_the_tokens_and_no_name(made):
    model = made(TIED)

    assert model.get_parameter("head.weight") is model.get_parameter("tokens.weight")
    names = [t.name for t in registry.layout_of(model).tensors]
    assert names == [t.name for t in registry.layout(DEFINITION).tensors if "head" not in t.name]


def test_tied_weight_is_trained_from_both_ends():
    model = registry.build(TIED)
    for name, values in init.initial_weights(registry.layout_of(model), seed=1):
        model.get_parameter(name).data.copy_(values)

    gpt.loss(model, some_rows()).backward()

    # Of an untied model only the tokens that were read have a gradient.
    gradient = model.get_parameter("tokens.weight").grad
    assert gradient is not None and gradient.ne(0).any(dim=1).all()


def test_definition_without_tied_is_that_of_an_untied_model():
    plain = {key: value for key, value in DEFINITION.items() if key != "tied"}

    assert registry.layout(plain) == registry.layout(DEFINITION)


@pytest.mark.parametrize("value", [1, 0, "yes", None])
def test_tied_that_is_no_truth_value_is_refused_by_name(value):
    with pytest.raises(ConfigError, match=r"model\.tied=.* must be true or false"):
        registry.build({**DEFINITION, "tied": value})


# Bits

TRAIN = """
import hashlib, torch
from atoll.models import gpt, init, registry

torch.set_num_threads(1)
model = registry.build(
    {"architecture": "gpt", "vocab": 32, "block": 64, "layers": 2, "heads": 4, "width": 64}
)
model.load_state_dict(dict(init.initial_weights(registry.layout_of(model), seed=1)))
generator = torch.Generator().manual_seed(0)
for _ in range(5):
    model.zero_grad()
    gpt.loss(model, torch.randint(0, 32, (8, 65), generator=generator)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad * 0.1)
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
"""


def test_training_on_one_thread_gives_the_same_bits_in_another_process():
    here: dict[str, hashlib._Hash] = {}
    exec(TRAIN, here)

    there = subprocess.run(
        [sys.executable, "-c", TRAIN + "print(digest.hexdigest())"],
        check=True,
        capture_output=True,
        text=True,
    )

    assert there.stdout.strip() == here["digest"].hexdigest()


GOLDEN_LAYOUT = "0b81fb34697801e103053829e531ac9c34fc5793a19860cc823251daa7d58053"
