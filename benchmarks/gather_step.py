"""What a gather run's coordinator does with a round of 20 contributions of 25 M parameters.

    norms      every contribution is read once for its factors
    step       again for the clipped mean, the weights moved and hashed
    artifact   again for the frame that islands may download, written and hashed
    start      the same frame from nothing but what is stored, as often as a coordinator that starts
               makes one: all that together are smaller than the weights

Seconds of one core: one thread, and files that were just written, so no disk is waited for.
"""

import hashlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from atoll.blobs.drafts import FileReader
from atoll.codecs.topk.codec import TopK
from atoll.compiled.base import compiled
from atoll.coordinator.rounds.spool import Spool
from atoll.files import SYSTEM
from atoll.layout import Layout
from atoll.strategies import registry
from atoll.strategies.gather.local import Fetched
from atoll.strategies.outer import OuterState, OuterStep, fresh_state
from atoll.sums.digest import RunningDigest
from atoll.wire.header import Told
from benchmarks.gather_validate import LAYOUT
from tests import gather_runs

PEERS, HEAD_BYTES = 20, 600  # what stands before a payload
ROUND = 7


@contextmanager
def contributions(home: Path, layout: Layout, peers: int) -> Iterator[list[Fetched]]:
    """They in files, opened."""
    with ExitStack() as stack:
        found = []
        for seed in range(peers):
            values = torch.randn(layout.size, generator=torch.Generator().manual_seed(seed)) * 1e-3
            payload = TopK().encode(values, noise=None, first_group=0).numpy().tobytes()
            path = home / f"contribution-{seed}"
            path.write_bytes(bytes(HEAD_BYTES) + payload)
            reader = FileReader(SYSTEM, SYSTEM.open(path), path=path, nbytes=path.stat().st_size)
            stack.callback(reader.close)
            name = hashlib.sha256(payload).hexdigest()
            found.append(Fetched(name, 1, HEAD_BYTES, reader.read))
        yield found


def measured(*, repeats: int, layout: Layout = LAYOUT, peers: int = PEERS) -> dict[str, Any]:
    """Medians in seconds, and the sizes that they are of."""
    strategy = registry.of(gather_runs.manifest())
    bundle = strategy.bundle(layout, peers)
    assert bundle is not None, "so few contributions are smaller than the weights"
    torch.set_num_threads(1)
    compiled.prepare(layout.size)
    step = strategy.outer(ROUND, 0)
    header = Told(
        kind="update",
        run_id="benchmark",
        manifest_sha256="0" * 64,
        round=ROUND,
        base_digest="0" * 64,
        result_digest="0" * 64,
    ).header(layout, bundle)
    weights = torch.zeros(layout.size)
    state = fresh_state(layout, weights, optimizer=step.optimizer, download=step.download)
    times: dict[str, list[float]] = {name: [] for name in ("norms", "step", "artifact", "start")}
    artifacts = (layout.nbytes - 1) // bundle.encoded_bytes(layout.size)
    with (
        tempfile.TemporaryDirectory(prefix="gather-step-") as home,
        contributions(Path(home), layout, peers) as sources,
    ):
        spool = Spool(Path(home) / "spool")

        def write(prepared: OuterStep) -> None:
            names = [one.sha256 for one in sources]
            with spool.spooler(bundle, header) as spooler:
                frame = spooler.stream(header, bundle.pieces(header, prepared, names, sources))
            frame.path.unlink()

        def start() -> None:
            for number in range(artifacts):
                again = strategy.outer(ROUND + number, 0).prepared(layout, sources)
                write(again)

        for _ in range(repeats + 1):  # the first one warms up
            prepared = _timed(times["norms"], lambda: step.prepared(layout, sources, watched=True))
            _timed(times["step"], partial(_apply, prepared, state, sources))
            _timed(times["artifact"], partial(write, prepared))
        for _ in range(repeats):
            _timed(times["start"], start)
    found = {name: statistics.median(taken[-repeats:]) for name, taken in times.items()}
    return {
        **{f"{name}_seconds": seconds for name, seconds in found.items()},
        "parameters": layout.size,
        "contributions": peers,
        "artifact_bytes": bundle.encoded_bytes(layout.size),
        "artifacts_at_a_start": artifacts,
    }


def _apply(step: OuterStep, state: OuterState, sources: list[Fetched]) -> None:
    running = RunningDigest(state.layout, state.master)
    step.apply(state, sources, None, reached=running.reached)
    running.finish()


def _timed(times: list[float], work: Callable[[], Any]) -> Any:
    begun = time.process_time()
    done = work()
    times.append(time.process_time() - begun)
    return done
