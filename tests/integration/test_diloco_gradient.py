"""A whole run of DiLoCo with one inner step of SGD: its displacement is the gradient of all rows.

The real coordinator and real islands, on a virtual clock. Uneven counts, which a synchronous round
never has, are in `examples/gradcheck/strategies/diloco.py`.
"""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.blobs.directory import DirectoryBlobs
from atoll.data import batches as batching
from atoll.data import registry as datasets
from atoll.layout import Layout
from atoll.ledger import engines
from atoll.models import gpt, registry
from atoll.protocol.manifest import Manifest
from atoll.versions import recorded
from atoll.versions.manifests import Manifests
from atoll.versions.replay import Replay
from tests.ledgers import alone
from tests.tiny import simulate

ISLANDS = 3
ROWS_EACH = 2
RATE = 8.0  # so large that fp32 loses little of the step to the weights
# Some ten roundings of fp32 (6e-8), on displacements ten times smaller than the weights.
TOLERANCE = 1e-5
SETTINGS: dict[str, Any] = {
    "sync_every": 1,
    "inner.batch": ROWS_EACH,
    "weighting": "tokens",
    "inner.optimizer": "sgd",
    "inner.lr": RATE,
    "inner.momentum": 0.0,
    "inner.weight_decay": 0.0,
    "inner.clip": 0.0,
    "outer.optimizer": "sgd",
    "outer.lr": 1.0,
    "upload.codec": "fp32",
    "download.codec": "fp32",
    "evaluate.every": 0,
    "membership.min_workers": ISLANDS,
    "stop.rounds": 1,
}


def trained(home: Path) -> tuple[Manifest, Layout, Tensor, Tensor, Tensor]:
    """The run's settings and layout, its weights before and after, and the rows in between."""
    with closing(engines.open_ledger(home / "ledger.sqlite")) as ledger:
        manifests = Manifests.of(ledger)
        manifest = manifests.first.manifest
        layout = recorded.layout_of(manifest)
        replay = Replay(
            ledger, DirectoryBlobs(home / "blobs"), manifests=manifests, layout=layout, threads=1
        )
        version = replay.restore(None)
        before = version.state.master.clone()
        replay.apply(version, 1, alone(ledger).contributions.of_round(1))
        data = datasets.open_dataset(manifest.data.definition)
        ranges = [lease.row_range for lease in alone(ledger).leases.of_round(1)]
        rows = torch.cat(list(batching.batches(data, ranges, batch=1, seed=manifest.seed)))
        return manifest, layout, before, version.state.master, rows


def gradient(manifest: Manifest, layout: Layout, weights: Tensor, rows: Tensor) -> Tensor:
    """Of the mean loss over `rows`, by one process."""
    model = registry.build(manifest.model.definition)
    with torch.no_grad():
        for name, values in layout.views(weights).items():
            model.get_parameter(name).copy_(values)
    gpt.loss(model, rows).backward()
    found = layout.zeros()
    for name, view in layout.views(found).items():
        grad = model.get_parameter(name).grad
        assert grad is not None
        view.copy_(grad)
    return found


def error(home: Path) -> float:
    """|g - r| / |r| of the run's displacement / rate and the gradient of all its rows."""
    manifest, layout, before, after, rows = trained(home)
    assert len(rows) == ISLANDS * ROWS_EACH
    wanted = gradient(manifest, layout, before, rows).double()
    found = (before.double() - after.double()) / RATE
    return float((found - wanted).norm() / wanted.norm())


def test_displacement_of_a_round_is_the_gradient_of_the_token_mean(tmp_path):
    simulate(ISLANDS, directory=tmp_path, **SETTINGS)

    assert error(tmp_path) < TOLERANCE


@pytest.mark.parametrize(
    "changes", [{"outer.lr": 0.5}, {"inner.clip": 0.01}, {"sync_every": 2, "inner.batch": 1}]
)
def test_displacement_is_another_one_with_other_settings(tmp_path, changes):
    """The control: half the rate, a clipped gradient, or two steps instead of one."""
    simulate(ISLANDS, directory=tmp_path, **{**SETTINGS, **changes})

    assert error(tmp_path) > 1e-2
