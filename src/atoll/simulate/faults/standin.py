"""The stand-in for a model: two hundred numbers, and displacements that tell who made them.

A displacement depends on the seed, the worker, its life, the round and its rows: whatever is
folded wrongly, twice, from the wrong life or in the wrong order gives other bits.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from atoll import config
from atoll.blobs.base import Blobs
from atoll.layout import Layout, byte_view
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import ManifestRecord, RunRecord
from atoll.protocol.manifest import DataSettings, Manifest, ModelSettings
from atoll.sums import digest as digests
from atoll.versions import weights
from atoll.wire import frame
from atoll.wire.header import FrameHeader

RUN_ID = "faults"
LAYOUT = Layout.of(
    [("embedding", (12, 8), "float32"), ("norm", (8,), "float32"), ("head", (8, 12), "float32")]
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


class Frame:
    """A whole contribution in memory."""

    def __init__(self, header: FrameHeader, made: Manifest, label: str) -> None:
        delta = values(label, scale=0.01)
        codec = made.upload.build()
        data = bytearray()
        writer = frame.FrameWriter(header, data.extend)
        writer.payload(byte_view(codec.encode(delta, noise=None, first_group=0)))
        writer.finish()
        self.header = header
        self.data = bytes(data)
        self.preamble = self.data[: -header.payload_bytes - frame.TRAILER_BYTES]
        self.sha256 = hashlib.sha256(self.data).hexdigest()
