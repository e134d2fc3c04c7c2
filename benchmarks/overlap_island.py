"""`atoll join` with a stopwatch: of each inner step, when it began and ended, as JSON.

With them goes processor time: of the training thread in the step, of the process up to its end.

Run by benchmarks/overlap.py with the words of `atoll`; ATOLL_STEPS_FILE names the result. Steps are
timed by wrapping the function that makes one, so the product carries no stopwatch.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atoll import cli
from atoll.island import trainer

steps: list[tuple[float, float, float, float]] = []


def timed(owner: Any, name: str) -> None:
    original: Callable[..., Any] = getattr(owner, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        began, used = time.perf_counter(), time.thread_time()
        found = original(*args, **kwargs)
        used = time.thread_time() - used
        steps.append((began, time.perf_counter(), used, time.process_time()))
        return found

    setattr(owner, name, wrapper)


timed(trainer, "_step")
try:
    cli.main()
finally:
    Path(os.environ["ATOLL_STEPS_FILE"]).write_text(json.dumps(steps))
