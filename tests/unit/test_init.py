import hashlib

import pytest
import torch

from atoll.layout import Layout
from atoll.models import init, registry

LAYOUT = Layout.of(
    [
        ("tokens.weight", (64, 128), "float32"),
        ("blocks.0.norm.weight", (128,), "float32"),
        ("blocks.0.attention.project.weight", (128, 128), "float32"),
        ("blocks.0.mlp.project.weight", (128, 512), "float32"),
        ("blocks.1.attention.project.weight", (128, 128), "float32"),
        ("blocks.1.mlp.project.weight", (128, 512), "float32"),
    ]
)
DEFINITION = {"architecture": "gpt", "vocab": 8, "block": 4, "layers": 1, "heads": 2, "width": 8}


def weights(layout=LAYOUT, *, seed=1):
    return dict(init.initial_weights(layout, seed=seed))


def test_initial_weights_follow_the_layout():
    made = weights()

    assert Layout.of_tensors(made) == LAYOUT


def test_initial_weights_give_their_golden_bits():
    data = b"".join(value.numpy().tobytes() for value in weights().values())

    assert hashlib.sha256(data).hexdigest() == GOLDEN_WEIGHTS


def test_weights_of_a_tensor_do_not_depend_on_its_neighbours():
    alone = Layout.of([("tokens.weight", (64, 128), "float32")])

    assert torch.equal(weights(alone)["tokens.weight"], weights()["tokens.weight"])


def test_tensors_of_one_shape_get_different_weights():
    made = weights()

    assert not torch.equal(
        made["blocks.0.attention.project.weight"], made["blocks.1.attention.project.weight"]
    )


def test_seeds_give_different_weights():
    assert not torch.equal(weights(seed=1)["tokens.weight"], weights(seed=2)["tokens.weight"])


def test_norms_start_as_ones():
    assert torch.equal(weights()["blocks.0.norm.weight"], torch.ones(128))


@pytest.mark.parametrize(
    ("name", "deviation"),
    # Two layers have four matrices that write to the residual stream: 0.02 / sqrt(4).
    [("tokens.weight", 0.02), ("blocks.0.mlp.project.weight", 0.01)],
)
def test_matrices_have_their_standard_deviation(name, deviation):
    value = weights()[name]

    # The standard error of a deviation over n values is 1/sqrt(2n): 0.8 % at n = 8192.
    assert value.std().item() == pytest.approx(deviation, rel=0.04)
    assert abs(value.mean().item()) < 0.05 * deviation


def test_initial_weights_leave_the_global_random_state_alone():
    before = torch.get_rng_state()

    weights(registry.layout_of(registry.build(DEFINITION)), seed=1)

    assert torch.equal(torch.get_rng_state(), before)


GOLDEN_WEIGHTS = "a8433046bd121589a8f2967791c978aa4126a28a107633c010990a35d01a8a7c"
