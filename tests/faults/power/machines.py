"""The run that loses power: a coordinator and two islands, each on a disk of its own.

Built from the production parts: `launch.state` opens the coordinator's directory as `atoll serve`
does, `boot` creates or opens the run, islands train with their own stores; only the transport is in
memory and the clock virtual. Starting on a used directory is the recovery under test.
"""

import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from atoll import config, torch_threads
from atoll.config import RunFile
from atoll.coordinator.stores import Stores
from atoll.island.state.store import IslandIdentity, IslandStore
from atoll.launch import state
from atoll.protocol.messages import Status
from atoll.simulate import cluster
from atoll.simulate.cluster import Outage, Progress, Simulated

ROUNDS = 3
ISLANDS = ("island-0", "island-1")
# Two levels, so that a directory is made in one that was made just before.
COORDINATOR = Path("coordinator") / "state"
RANK = Path("rank") / "saves"
OPERATOR = Path("operator")  # exists before the run
GATHERER = Path("gatherer")
BUCKET = Path("bucket") / "objects"
STORE = Path("store") / "deep" / "blobs"
ELSEWHERE = Path("elsewhere") / "state"
REPAIRED = Path("repaired") / "state"
RESET = Path("reset") / "state"
WALL = 1_700_000_000.0

_SETTINGS: dict[str, Any] = {
    "name": "power",
    "seed": 1,
    "sync_every": 1,
    "model": {
        "architecture": "gpt",
        "vocab": 32,
        "block": 8,
        "layers": 1,
        "heads": 1,
        "width": 8,
    },
    "data": {"kind": "synthetic", "seed": 7, "rows": 64, "held_out_rows": 4, "block": 8},
    # State worth losing: Adam's moments and, from bf16, a residual on every island; outer momentum
    # and snapshots, of which one is kept, on the coordinator.
    "inner": {"optimizer": "adamw", "lr": 3e-3, "batch": 2, "clip": 1.0, "threads": 1},
    "outer": {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.9},
    "upload": {"codec": "bf16"},
    "download": {"codec": "fp32"},
    "membership": {"min_workers": 2},
    "evaluate": {"every": 0},
    "stop": {"rounds": ROUNDS},
    "storage": {"snapshot_every": 1, "retain": "snapshots", "keep_snapshots": 1},
}


def run_file() -> RunFile:
    """The run file of the recorded run."""
    return config.parse(_SETTINGS)


class Machines(cluster.SimulatedCluster):
    """A simulated cluster whose coordinator is opened as `atoll serve` opens it."""

    def __init__(self, home: Path, outage: Outage | None = None) -> None:
        self._held = ExitStack()
        super().__init__(run_file(), home, None, outage)
        self.coordinator.close_stores = self._held.close  # type: ignore[method-assign]
        for index, name in enumerate(ISLANDS):
            remember_identity(home / name, index)

    def _open_stores(self) -> Stores:
        return self._held.enter_context(state.held(self._home / COORDINATOR, state.Addresses()))


def remember_identity(directory: Path, index: int) -> None:
    """As `atoll join` does at its first start; the key is the one the simulation uses."""
    store = IslandStore(directory)
    try:
        if store.identity() is None:
            key = random.Random(f"island key {index}").randbytes(32).hex()
            store.set_identity(IslandIdentity(cluster.worker_name(index), key))
    finally:
        store.close()


def run(home: Path, *, progress: Progress | None = None, outage: Outage | None = None) -> Simulated:
    """Starts on what is below `home`, or from nothing, and runs to the end."""
    with torch_threads.kept():
        return Machines(home, outage).run(len(ISLANDS), progress or _ignore)


def _ignore(_: Status) -> None:
    """Nobody watches."""
