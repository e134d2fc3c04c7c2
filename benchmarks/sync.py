"""How long one whole sync of a 25 M-parameter model takes, against gloo `all_reduce` of its size.

Coordinator and islands are real processes on loopback; every contribution is synced to disk before
its receipt. gloo runs before and after each codec, in the same run. A shared machine is at times
half as fast as a minute before, so all of that is repeated and a bar is the median of its ratios.
Also: the coordinator's peak memory above its fp32 copies and the loaded libraries, with 2 and with
8 islands.

    python -m benchmarks.sync [--json] [--rounds 10] [--repeats 5] [--codec bf16] [--no-memory]
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from atoll.compiled.base import LARGE_ELEMENTS
from atoll.launch import local
from atoll.launch.local import Tokens
from benchmarks.report import Bar, report, show

TOKENS = Tokens("benchmark-worker-token", "benchmark-admin-token")
AIMS = {"fp32": 16.0, "bf16": 9.0, "int8": 7.0}  # times gloo, from the issue
MEMORY_AIM_MB = 128.0
MODEL = {"layers": 8, "heads": 8, "width": 512}  # 25.5 M parameters with vocab 256, block 64
TINY = {"layers": 1, "heads": 2, "width": 32}
RUN_FILE = """
name = "sync-benchmark"
sync_every = 1
weighting = "equal"
heartbeat_interval = 1.0
heartbeat_timeout = 30.0
[model]
architecture = "gpt"
vocab = 256
block = 64
layers = {layers}
heads = {heads}
width = {width}
[data]
kind = "synthetic"
seed = 1
rows = 100000
held_out_rows = 1
block = 64
[inner]
batch = 1
[outer]
optimizer = "nesterov"
[upload]
codec = "{codec}"
[download]
codec = "{codec}"
[membership]
min_workers = {islands}
[evaluate]
every = 0
[stop]
rounds = {rounds}
[storage]
snapshot_every = 1000000
"""


def gloo_rank(rank: int, path: str, elements: int, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    tensor = torch.ones(elements)
    times = []
    for _ in range(12):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        times.append(time.perf_counter() - began)
        tensor.fill_(1.0)
    if rank == 0:
        results.put(times[2:])
    dist.destroy_process_group()


def gloo_seconds(elements: int) -> list[float]:
    """Times of `all_reduce` of the model's fp32 bytes between two processes."""
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as made:
        processes = [
            context.Process(target=gloo_rank, args=(r, f"{made}/store", elements, results))
            for r in range(2)
        ]
        for process in processes:
            process.start()
        times: list[float] = results.get()
        for process in processes:
            process.join()
    return times


def peak_memory_mb(pid: int) -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", text)
    return 0.0 if found is None else int(found.group(1)) / 1000  # None: it has just ended


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_compiled(coordinator: local.LocalCoordinator, *, seconds: float = 120.0) -> None:
    """The loops of its first seconds are not measured; see `atoll.compiled`."""
    until = time.monotonic() + seconds
    while "tile loops are compiled" not in coordinator.log_path.read_text():
        assert coordinator.is_running() and time.monotonic() < until, coordinator.log_tail()
        time.sleep(0.05)


def numba_mb() -> float:
    """Peak memory that numba and the compiled loops add to a process; nothing without numba."""
    program = (
        "import torch, atoll.strategies.diloco\n"
        "from atoll.compiled import base\n"
        "peak = lambda: int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
        "before = peak()\n"
        "base.compiled.prepare(base.LARGE_ELEMENTS); base.compiled.wait()\n"
        "print(peak() - before)\n"
    )
    made = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return int(made.stdout) / 1000


def run_syncs(codec: str, *, islands: int, rounds: int, model: dict[str, int]) -> dict[str, Any]:
    """One run of `rounds` rounds; what the islands measured and the coordinator's peak memory."""
    with tempfile.TemporaryDirectory(prefix="atoll-bench-", dir=".") as made:
        home = Path(made)
        run_file = home / "run.toml"
        run_file.write_text(RUN_FILE.format(codec=codec, islands=islands, rounds=rounds, **model))
        coordinator = local.start_coordinator(run_file, home / "c", tokens=TOKENS)
        coordinator.wait_ready()
        if find_spec("numba") is not None and elements_of(model) >= LARGE_ELEMENTS:
            wait_compiled(coordinator)
        processes = []
        environment = {**os.environ, "ATOLL_TOKEN": TOKENS.worker}
        for index in range(islands):
            words = [sys.executable, str(Path(__file__).with_name("sync_island.py"))]
            words += [coordinator.url, str(home / f"i{index}"), f"island-{index}"]
            words += [str(home / f"r{index}.json")]
            processes.append(subprocess.Popen(words, env=environment))
        idle = processor_seconds(coordinator.pid)
        peak, used = 0.0, idle
        while any(p.poll() is None for p in processes) and coordinator.is_running():
            peak = max(peak, peak_memory_mb(coordinator.pid))
            used = max(used, processor_seconds(coordinator.pid))
            time.sleep(0.05)
        assert all(p.wait() == 0 for p in processes), coordinator.log_tail()
        coordinator.wait(timeout_seconds=60)
        found = [json.loads((home / f"r{i}.json").read_text()) for i in range(islands)]
        return {
            "syncs": [f["sync"] for f in found],
            "phases": [f["phases"] for f in found],
            "sent": found[0]["sent"] / rounds,
            "received": found[0]["received"] / rounds,
            "processor": {
                "coordinator": (used - idle) / rounds,
                "each island": statistics.median(found[0]["processor"]),
            },
            "peak_memory_mb": peak,
            "closes": _closes(coordinator.log_path.read_text()),
        }


def _closes(log: str) -> dict[str, float]:
    """Medians of what the coordinator logged about closing a round, in seconds."""
    names = ("compute_seconds", "record_seconds")
    return {
        name: statistics.median([float(x) for x in re.findall(rf"{name}=([0-9.]+)", log)] or [0.0])
        for name in names
    }


def measure(codec: str, *, rounds: int, elements: int) -> dict[str, Any]:
    before = gloo_seconds(elements)
    found = run_syncs(codec, islands=2, rounds=rounds, model=MODEL)
    after = gloo_seconds(elements)
    # A round is over when its slowest island has the new weights; the first round warms up.
    syncs = [max(pair) for pair in zip(*found["syncs"], strict=True)][1:]
    gloo = statistics.median(before + after)
    phases = {
        name: statistics.median(times[1:] or times) for name, times in found["phases"][0].items()
    }
    return {
        "codec": codec,
        "sync_seconds": statistics.median(syncs),
        "sync_seconds_all": syncs,
        "gloo_seconds": gloo,
        "gloo_seconds_best": min(before + after),
        "ratio": statistics.median(syncs) / gloo,
        "island_phases_seconds": phases,
        "coordinator_phases_seconds": found["closes"],
        "processor_seconds": found["processor"],
        "sent_mb": found["sent"] / 1e6,
        "received_mb": found["received"] / 1e6,
    }


def typical(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The measurement whose ratio is the median one (the upper of two), with all the ratios."""
    ordered = sorted(found, key=lambda one: float(one["ratio"]))
    return {**ordered[len(ordered) // 2], "ratios": [one["ratio"] for one in found]}


def memory(codec: str, *, islands: int, copies: float, libraries: float) -> dict[str, Any]:
    found = run_syncs(codec, islands=islands, rounds=4, model=MODEL)
    return {
        "codec": codec,
        "islands": islands,
        "peak_mb": found["peak_memory_mb"],
        "above_copies_and_libraries_mb": found["peak_memory_mb"] - copies - libraries,
    }


def copies_mb(elements: int) -> float:
    return 3 * elements * 4 / 1e6  # master, momentum, published, all fp32


def elements_of(model: dict[str, int]) -> int:
    from atoll.models import registry as models

    definition = {"architecture": "gpt", "vocab": 256, "block": 64, **model}
    return models.layout_of(models.on_meta(definition)).size


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--json", action="store_true")
    arguments.add_argument("--rounds", type=int, default=10)
    arguments.add_argument("--repeats", type=int, default=5)
    arguments.add_argument("--codec", action="append", choices=list(AIMS))
    arguments.add_argument("--no-memory", action="store_true")
    given = arguments.parse_args()
    elements = elements_of(MODEL)
    codecs = given.codec or list(AIMS)
    measured: dict[str, list[dict[str, Any]]] = {codec: [] for codec in codecs}
    for _ in range(given.repeats):
        for codec in codecs:
            measured[codec].append(measure(codec, rounds=given.rounds, elements=elements))
    syncs = [typical(found) for found in measured.values()]
    bars = [Bar(f"sync of {s['codec']}, times gloo", s["ratio"], AIMS[s["codec"]]) for s in syncs]
    memories = []
    if not given.no_memory:
        tiny = run_syncs("bf16", islands=2, rounds=4, model=TINY)["peak_memory_mb"]
        libraries = tiny + numba_mb()  # which a small model does not load
        copies = copies_mb(elements)
        for islands in (2, 8):
            found = memory("bf16", islands=islands, copies=copies, libraries=libraries)
            memories.append({**found, "libraries_mb": libraries, "copies_mb": copies})
            name = f"coordinator memory above copies, {islands} islands, MB"
            bars.append(Bar(name, found["above_copies_and_libraries_mb"], MEMORY_AIM_MB))
    results = {"elements": elements, "syncs": syncs, "memory": memories}
    show(report(results, bars), as_json=given.json)
    if not given.json:
        for s in syncs:
            sys.stdout.write(
                f"{s['codec']}: times gloo {', '.join(f'{r:.1f}' for r in s['ratios'])}; "
                f"sync {s['sync_seconds']:.3f} s, gloo {s['gloo_seconds']:.3f} s; "
                f"island {_phases(s['island_phases_seconds'])}; "
                f"coordinator {_phases(s['coordinator_phases_seconds'])}; "
                f"processor {_phases(s['processor_seconds'])}\n"
            )


def _phases(found: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.3f}" for name, seconds in found.items())


if __name__ == "__main__":
    main()
