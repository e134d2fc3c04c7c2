"""From a manifest to the steps of a rank."""

from typing import Any

import pytest

from atoll.clock import Clock
from atoll.collectives.base import Collectives
from atoll.errors import ConfigError
from atoll.models import gpt, registry
from atoll.protocol.manifest import InnerSettings, Manifest, ShardedSettings
from atoll.strategies.sharded import build
from atoll.strategies.sharded.adamw import AdamW
from atoll.strategies.sharded.step import Made
from tests import sharded
from tests.sharded import Training

SHORT = Training(steps=1)


def made(settings: dict[str, Any], inner: dict[str, Any], *, steps: int = 2) -> list[list[Made]]:
    manifest = Manifest.model_construct(
        seed=1, inner=InnerSettings(**inner), sharded=ShardedSettings(**settings)
    )

    def work(ranks: Collectives, clock: Clock) -> list[Made]:
        shard = sharded.filled(SHORT, rank=ranks.rank, size=ranks.size)
        model = registry.hollow(SHORT.model)
        step = build.step(manifest, model, shard, ranks, group=1, clock=clock)
        numbers = range(1, steps + 1)
        return [step.train(n, sharded.own(SHORT, n, ranks), gpt.loss, lr=1e-2) for n in numbers]

    return sharded.threads(2, work, way="direct")


def told(settings: dict[str, Any], inner: dict[str, Any] | None = None) -> tuple[float, float]:
    """The losses of two steps."""
    first, second = made(settings, inner or {})[0]
    return first.loss_sum, second.loss_sum


@pytest.mark.parametrize(
    ("settings", "inner"),
    [
        ({"gradients": "int8"}, {}),
        ({"gradients": "int8", "residuals": True}, {}),
        ({"parameters": "bf16"}, {}),
        ({"parameters": "int8"}, {}),
        ({"onebit_warmup_steps": 1}, {}),
        ({}, {"precision": "bf16"}),
        ({"parameters": "bf16"}, {"precision": "bf16"}),
        ({}, {"clip": 0.01, "beta1": 0.5}),
    ],
)
def test_each_setting_is_at_work_and_trains_near_the_plain_one(settings, inner):
    found, plain = made(settings, inner, steps=3)[0], made({}, {}, steps=3)[0]

    assert found[0].loss_sum == pytest.approx(plain[0].loss_sum, rel=2e-2)
    assert found[0].norm == pytest.approx(plain[0].norm, rel=0.1)
    assert found[2].loss_sum != plain[2].loss_sum


def test_optimizer_has_the_manifests_numbers():
    inner = InnerSettings(beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.3)

    assert build.rule(inner) == AdamW(beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.3)


def test_other_optimizer_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"inner\.optimizer='sgd'"):
        build.rule(InnerSettings(optimizer="sgd"))


def test_int8_parameters_of_bf16_passes_are_refused():
    with pytest.raises(ConfigError, match=r"'int8' and are computed in torch\.bfloat16"):
        made({"parameters": "int8"}, {"precision": "bf16"})


def test_clipping_of_the_manifest_is_at_work():
    loose, tight = told({}, {"clip": 0.0, "eps": 1e-2}), told({}, {"clip": 1e-6, "eps": 1e-2})

    assert loose[0] == tight[0]
    assert loose[1] < tight[1]  # a step of next to nothing
