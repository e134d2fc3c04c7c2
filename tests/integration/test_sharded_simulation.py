"""Sharded runs in one process, with the real coordinator: calm ones first."""

import pytest

from atoll.simulate import cluster
from tests import clusters

TABLE = {
    "strategy": "sharded",
    "seed": 3,
    "model": {
        "architecture": "gpt", "vocab": 16, "block": 8, "layers": 2, "heads": 2, "width": 8,
    },
    "data": {
        "kind": "synthetic", "seed": 1, "rows": 500, "held_out_rows": 4, "block": 8, "vocab": 16,
    },
    "inner.batch": 7,
    "inner.lr": 0.01,
    "inner.clip": 1.0,
    "evaluate.every": 1,
    "stop.rounds": 3,
    "heartbeat_interval": 0.5,
    "heartbeat_timeout": 2.0,
    "sharded.save_every": 2,
    "sharded.checkpoint_every": 2,
    "sharded.deadline_seconds": 5.0,
}  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4])
def test_simulated_run_is_checkpointed_to_its_end(tmp_path, ranks):
    file = clusters.run_file({**TABLE, "membership.min_workers": 2})

    result = cluster.simulate(file, islands=ranks, directory=tmp_path)

    losses = [entry.evaluation_loss or 0.0 for entry in result.status.history]
    assert result.status.state == "finished"
    assert result.status.version == 3
    assert losses[-1] < losses[0]
