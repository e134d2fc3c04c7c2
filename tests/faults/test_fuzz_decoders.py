"""A short, bounded run of the coverage-guided fuzzer; longer ones are started by hand."""

import re
import subprocess
import sys
from pathlib import Path

HARNESS = Path(__file__).parents[1] / "fuzz" / "fuzz_frame.py"
RUNS = 20_000


def test_decoders_survive_a_bounded_run_of_the_fuzzer(tmp_path):
    done = subprocess.run(
        [sys.executable, str(HARNESS), f"-runs={RUNS}", "-seed=1", "-max_len=1024", "-timeout=20"],
        cwd=tmp_path,  # libFuzzer leaves a crashing input where it runs
        capture_output=True,
        text=True,
        timeout=170,
    )

    executed = re.search(r"Done (\d+) (?:runs|in)", done.stderr)
    assert done.returncode == 0, done.stderr[-4000:]
    assert executed is not None, done.stderr[-4000:]
    assert int(executed[1]) >= RUNS
    assert list(tmp_path.iterdir()) == []
