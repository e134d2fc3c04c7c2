"""An island that only syncs: moves its weights a little, hands them in, and times the way back.

Run by benchmarks/sync.py with: url, state directory, worker_id, result file. Uses the public API;
phases are timed by wrapping the parts it calls, so the product carries no stopwatch.
"""

import json
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from atoll.clock import SystemClock
from atoll.compiled.base import compiled
from atoll.data import registry as datasets
from atoll.island.link.network import NetworkLink
from atoll.island.pulse import pulse
from atoll.island.run import Run
from atoll.island.state import encoding
from atoll.island.state.store import IslandIdentity, IslandStore
from atoll.launch import memory
from atoll.models import registry as models
from atoll.protocol.messages import AssignmentRequest
from atoll.sums.digest import RunningDigest

phases: dict[str, list[float]] = defaultdict(list)


def timed(owner: Any, name: str, label: str, *, of: type = object) -> None:
    """Times the calls of `name`; with `of` only those whose last argument is one."""
    original: Callable[..., Any] = getattr(owner, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not isinstance(args[-1], of):
            return original(*args, **kwargs)
        began = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            phases[label].append(time.perf_counter() - began)

    setattr(owner, name, wrapper)


def main() -> None:
    url, state, worker_id, result = sys.argv[1:5]
    torch.set_num_threads(1)
    memory.keep_freed_tiles()  # as `atoll.join` does
    timed(encoding, "encode", "encode")
    timed(NetworkLink, "upload", "upload")
    timed(NetworkLink, "send", "wait", of=AssignmentRequest)
    timed(NetworkLink, "download", "fetch")
    timed(RunningDigest, "_hash", "hash of a leaf")
    link = NetworkLink(url, token=os.environ["ATOLL_TOKEN"])
    store = IslandStore(Path(state))
    run = Run(
        link,
        store,
        SystemClock(),
        identity=IslandIdentity(worker_id, random.Random(worker_id).randbytes(32).hex()),
        jitter=random.Random(0),
    )
    model = models.build(run.manifest.model.definition)
    dataset = datasets.open_dataset(run.manifest.data.definition)
    run.load(model)
    compiled.wait()  # a run's first seconds are without the compiled loops; they are not measured
    beats = pulse(run)
    beats.start()
    noise = torch.from_numpy(np.random.default_rng(1).standard_normal(1 << 20)).float()
    syncs: list[float] = []
    processor: list[float] = []
    ended: tuple[float, float] | None = None
    for _ in run.batches(dataset):
        if ended is not None:
            syncs.append(time.perf_counter() - ended[0])
            processor.append(time.process_time() - ended[1])
        with torch.no_grad():
            for parameter in model.parameters():
                flat = parameter.view(-1)
                size = min(flat.numel(), noise.numel())
                flat[:size].add_(noise[:size], alpha=1e-3)
        run.step(loss=1.0)
        ended = (time.perf_counter(), time.process_time())
    beats.stop()
    Path(result).write_text(
        json.dumps(
            {
                "sync": syncs,
                "processor": processor,
                "phases": phases,
                "sent": link.traffic.sent,
                "received": link.traffic.received,
            }
        )
    )


main()
