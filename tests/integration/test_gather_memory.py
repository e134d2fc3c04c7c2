"""How much a rank holds to apply a window: its budget, whatever the payloads weigh together."""

import json
import os
import subprocess
import sys

from benchmarks.gather import HELD_ALONE

BUDGET_MB = 16
WINDOW = {"peers": 4, "budget_mb": BUDGET_MB, "megabytes": 2.5}  # 10 MB of payloads


def test_update_stays_within_its_budget_and_one_exchange_of_all_tiles_would_not():
    """In one process, the control last: the highest mark is forgotten between the two."""
    windows = [WINDOW, {**WINDOW, "tiles_per_exchange": 10_000}]

    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gather_memory", json.dumps(windows)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **HELD_ALONE},
        timeout=120,
    )

    kept, hoarded = (one["peak_mb"] for one in json.loads(done.stdout))
    assert kept < BUDGET_MB < hoarded
