"""The codecs that the fault simulation computes for itself: the same bytes and values, in numpy."""

import numpy as np
import pytest
import torch

from atoll.codecs import registry  # noqa: F401  # what can be chosen
from atoll.codecs.noise import Noise
from atoll.codecs.settings import CodecSettings
from atoll.layout import byte_view
from atoll.simulate.faults import payloads
from atoll.simulate.faults.payloads import Lane

SETTINGS = [
    {"codec": "fp32"},
    {"codec": "bf16", "rounding": "nearest"},
    {"codec": "bf16", "rounding": "stochastic"},
    {"codec": "int8", "block": 32, "rounding": "nearest"},
    {"codec": "int8", "block": 32, "rounding": "stochastic"},
    {"codec": "int4", "block": 16, "rounding": "nearest"},
    {"codec": "int4", "block": 32, "rounding": "stochastic"},
    {"codec": "sign", "block": 32},
    {"codec": "topk"},
]


@pytest.mark.parametrize("scale", [1e-30, 1e-2, 1.0, 300.0], ids=str)
@pytest.mark.parametrize("size", [1, 8, 96, 200, 333])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_payload_and_values_are_the_codecs_own(settings, size, scale):
    rng = np.random.default_rng([size, round(1 / scale)])
    values = (rng.standard_normal(size) * scale).astype(np.float32)
    values[rng.random(size) < 0.2] = 0.0
    codec = CodecSettings.chosen(settings).model_validate(settings).build()

    payload = codec.encode(torch.from_numpy(values), noise=Noise(5, 3, "upload/a"), first_group=0)
    found = payloads.encode(values, settings, Lane(5, 3, "upload/a"))

    assert found == bytes(byte_view(payload))
    arrived = codec.decode(payload, size).numpy()
    assert payloads.decode(found, settings, size).tobytes() == arrived.tobytes()


def test_values_of_one_size_are_kept_from_the_front():
    values = np.full(130, -0.25, np.float32)
    codec = CodecSettings.chosen({"codec": "topk"}).model_validate({"codec": "topk"}).build()

    payload = codec.encode(torch.from_numpy(values), noise=None, first_group=0)

    assert payloads.encode(values, {"codec": "topk"}, Lane(0, 1, "download")) == bytes(payload)
