"""The most memory that a rank takes to apply a window, above libraries, loops and its own tiles.

A process of its own, because the highest mark of another's work would stay:

    python -m benchmarks.gather_memory '[{"peers": 16, "budget_mb": 64, "megabytes": 2.5}]'

Payloads lie in files, 2.5 MB each at 125 M parameters. Prints what each window of the list took.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from atoll.clock import SystemClock
from atoll.codecs.topk.chunks import CHUNK, chunk_bytes
from atoll.codecs.topk.codec import TopK
from atoll.collectives.local import LocalGroup
from atoll.collectives.runners import Inline
from atoll.compiled.base import FULL_TILE_ELEMENTS, LARGE_ELEMENTS, compiled
from atoll.gather import consume
from atoll.gather.budget import Budget
from atoll.gather.consume import Held
from atoll.gather.exchange import Routes
from atoll.gather.partial import Accepted, Partial
from atoll.gather.turns import Turns
from atoll.layout import Layout
from atoll.optim.sgd import Sgd


@dataclass(frozen=True, kw_only=True)
class Window:
    """What is measured."""

    peers: int
    budget_mb: int
    megabytes: float  # of one payload
    tiles_per_exchange: int = 0  # 0: what the budget gives


class Files:
    """Payloads in files, read by position."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._files = {uid: os.open(path, os.O_RDONLY) for uid, path in paths.items()}

    def read(self, uid: str, start: int, stop: int) -> bytes:
        return os.pread(self._files[uid], stop - start, start)

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)


def layout_of(elements: int) -> Layout:
    """Thirty tensors, whose edges are no tile's."""
    edges = [elements * k // 30 for k in range(31)]
    sizes = [stop - start for start, stop in pairwise(edges)]
    return Layout.of((f"p{k}", (size,), "float32") for k, size in enumerate(sizes))


def write_payload(path: Path, elements: int, *, seed: int) -> None:
    """A payload of tiles that are all alike: chunks say nothing about their place."""
    drawn = np.random.default_rng(seed).standard_normal(FULL_TILE_ELEMENTS, np.float32)
    tile = TopK().encode(torch.from_numpy(drawn * np.float32(1e-3)), noise=None, first_group=0)
    data, nbytes = tile.numpy().tobytes(), TopK().encoded_bytes(elements)
    with path.open("wb") as file:
        for start in range(0, nbytes, len(data)):
            file.write(data[: nbytes - start])


def applied(elements: int, window: Window, master: torch.Tensor, home: Path) -> float:
    """Applies a window by one rank; seconds of it."""
    layout = layout_of(elements)
    uids = [f"u{k:03d}" for k in range(window.peers)]
    for seed, uid in enumerate(uids):
        write_payload(home / uid, elements, seed=seed)
    squares = tuple(1.0 for _ in layout.tensors)
    nbytes = TopK().encoded_bytes(elements)
    told = [Accepted(uid, "0" * 64, nbytes, squares, None, 0, 0) for uid in uids]
    budget = Budget.of(
        window.budget_mb << 20, peers=window.peers, ranks=1, layout=layout, codec=TopK()
    )
    routes = Routes(
        layout,
        (next(layout.tiles(layout.nbytes + (1 << 20))),),
        dict.fromkeys(uids, 0),
        budget.tile_bytes,
        window.tiles_per_exchange or budget.tiles_per_exchange,
    )
    ranks = LocalGroup(1, clock=SystemClock()).rank(0, Inline())
    source = Files({uid: home / uid for uid in uids})
    begun = time.process_time()
    with consume.consumed(
        ranks,
        Turns(1, 1),
        routes,
        result=[Partial(0, tuple(told))],
        source=source,
        held=Held(master=master, slots={}, optimizer=Sgd(0.4), step=1),
        weights={},
        directory=home,
        settings=consume.Settings(),
    ):
        pass
    source.close()
    return time.process_time() - begun


def highest() -> int:
    """The most resident bytes since `forget`; not ru_maxrss, which is the parent's at first."""
    [line] = [one for one in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in one]
    return int(line.split()[1]) * 1024


def forget() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def warm() -> None:
    """Compiles the loops."""
    torch.set_num_threads(1)
    compiled.prepare(LARGE_ELEMENTS)
    compiled.wait()


def measured(window: Window) -> dict[str, float]:
    elements = int(window.megabytes * 1e6) // chunk_bytes(CHUNK) * CHUNK
    with tempfile.TemporaryDirectory() as home:
        small = Window(peers=2, budget_mb=64, megabytes=0.0)
        applied(2 * FULL_TILE_ELEMENTS, small, torch.ones(2 * FULL_TILE_ELEMENTS), Path(home))
        master = torch.ones(elements)
        forget()
        before = highest()
        seconds = applied(elements, window, master, Path(home))
        return {"peak_mb": (highest() - before) / 2**20, "processor_seconds": seconds}


if __name__ == "__main__":
    warm()
    found = [measured(Window(**one)) for one in json.loads(sys.argv[1])]
    sys.stdout.write(json.dumps(found) + "\n")
