"""The stand-in for a model: two hundred numbers, and displacements that tell who made them.

A displacement depends on the seed, the worker, its life, the round and its rows: whatever is
folded wrongly, twice, from the wrong life or in the wrong order gives other bits.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll import config
from atoll.blobs.base import Blobs
from atoll.layout import Layout, byte_view
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import ManifestRecord, RunRecord
from atoll.protocol.manifest import DataSettings, Manifest, ModelSettings
from atoll.strategies import build
from atoll.sums import digest as digests
from atoll.versions import weights
from atoll.wire import frame
from atoll.wire.header import FrameHeader

RUN_ID = "faults"
LAYOUT = Layout.of(
    # In the order of their names: so a run of several fragments has them in this order too.
    [("embedding", (12, 8), "float32"), ("head", (8, 12), "float32"), ("norm", (8,), "float32")]
)


def values(label: str, *, scale: float) -> Tensor:
    """A flat fp32 buffer that depends on `label` alone."""
    key = int.from_bytes(hashlib.sha256(label.encode()).digest()[:8], "little")
    drawn = np.random.Generator(np.random.Philox(key=key)).standard_normal(LAYOUT.size)
    return torch.from_numpy((drawn * scale).astype(np.float32))


INITIAL = values("initial", scale=1.0)
INITIAL_DIGEST = digests.digest(LAYOUT, INITIAL).root


def manifest(settings: Mapping[str, Any], data: Mapping[str, Any]) -> Manifest:
    """The manifest of a run over the stand-in; `settings` as in a run file, `data` an identity."""
    table = {"name": "faults", "model": {}, "data": {}, **settings}
    return config.parse(table).manifest(
        ModelSettings(definition={}, layout_digest=LAYOUT.digest, initial_digest=INITIAL_DIGEST),
        DataSettings(definition={}, identity=dict(data)),
    )


def create(ledger: Ledger, blobs: Blobs, made: Manifest, *, wall: float) -> None:
    """Records the run in an empty ledger."""
    sha256 = made.sha256()
    header = weights.weights_header(
        LAYOUT, run_id=RUN_ID, manifest_sha256=sha256, version=0, digest=INITIAL_DIGEST
    )
    stored = weights.store(blobs, header, INITIAL, layout=LAYOUT)
    with ledger.writing() as t:
        t.run.create(
            RunRecord(RUN_ID, wall, stored), ManifestRecord(1, sha256, made.body(), from_round=1)
        )


def module() -> nn.Module:
    """A module whose parameters are the layout's tensors."""
    made = nn.Module()
    for spec in LAYOUT.tensors:
        made.register_parameter(spec.name, nn.Parameter(torch.zeros(spec.shape)))
    return made


def move(model: nn.Module, delta: Tensor) -> None:
    """Moves every parameter of `model` by its part of `delta`, as training would."""
    parts = LAYOUT.views(delta)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.sub_(parts[name])


class Inner:
    """The inner state: for how many rounds it was trained. Looks like an optimizer."""

    def __init__(self) -> None:
        self.state: dict[int, dict[str, Any]] = {}
        self.param_groups: list[dict[str, Any]] = [{"params": [None]}]

    def as_optimizer(self) -> Optimizer:
        return cast(Optimizer, self)

    @property
    def rounds(self) -> int:
        return int(self.state.get(0, {}).get("rounds", 0))

    @rounds.setter
    def rounds(self, value: int) -> None:
        self.state[0] = {"rounds": value}

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state, "param_groups": self.param_groups}

    def load_state_dict(self, given: dict[str, Any]) -> None:
        self.state = given["state"]


class Frame:
    """A whole contribution in memory; fulfils `state.base.Frame`."""

    def __init__(self, data: bytes, sha256: str) -> None:
        self.data = data
        self.nbytes = len(data)
        self.sha256 = sha256
        self.header, start = frame.parse_preamble(data[: frame.MAX_PREAMBLE_BYTES])
        self.preamble = data[:start]
        self.payload = data[start : start + self.header.payload_bytes]

    def read(self, offset: int, nbytes: int) -> bytes:
        return self.data[offset : offset + nbytes]

    def close(self) -> None:
        """Nothing is open."""


def contribution(header: FrameHeader, made: Manifest, label: str) -> Frame:
    """A frame under `header` whose displacement depends on `label`."""
    codec, noise = made.upload.build(), build.upload_noise(made, header.round, label)
    delta = values(label, scale=0.01)[: header.elements]
    payload = codec.encode(delta, noise=noise, first_group=0)
    data = bytearray()
    writer = frame.FrameWriter(header, data.extend)
    writer.payload(byte_view(payload))
    writer.finish()
    return Frame(bytes(data), hashlib.sha256(data).hexdigest())
