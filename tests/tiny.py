"""A tiny run, and its simulation in one process: every part of a run, in a second."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atoll.simulate import cluster as simulation
from atoll.simulate.cluster import Simulated
from tests import clusters

ROUNDS = 3
SIZE: dict[str, Any] = {"vocab": 16, "block": 8, "layers": 1, "heads": 2, "width": 8}
MODEL: dict[str, Any] = {"architecture": "gpt", **SIZE}
TABLE: dict[str, Any] = {
    "seed": 3,
    "model": MODEL,
    "data": {
        "kind": "synthetic",
        "seed": 1,
        "rows": 500,
        "held_out_rows": 4,
        "block": 8,
        "vocab": 16,
    },
    "inner.batch": 2,
    "inner.lr": 0.01,
    "upload.codec": "bf16",
    "evaluate.every": 1,
    "stop.rounds": ROUNDS,
}


def simulate(
    islands: int = 2,
    *,
    directory: Path | None = None,
    speeds: Sequence[float] = (),
    **changes: Any,
) -> Simulated:
    file = clusters.run_file({**TABLE, **changes})
    return simulation.simulate(file, islands=islands, directory=directory, speeds=speeds)
