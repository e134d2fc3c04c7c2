"""How much of the time that a synchronous island waits streaming gives back, on a slow link.

An island and a coordinator, real processes with a core each, in two network namespaces whose link
carries 100 Mbit/s each way; a GPT of 5 M parameters. A cycle is H steps and what they wait for:

    saved = (sync's cycle - streaming's) / min(sync's wait, sync's compute)

The denominator is what a perfect overlap saves. sync and streaming take turns, a bar is the median
of its repeats; a repeat's times are medians over cycles, without the first. H = 128 and int4 are
measured once and reported. Needs root, for the namespaces.

    python -m benchmarks.overlap [--json] [--cycles 6] [--repeats 3] [--only H32|H32-int4|H128]
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.launch import local
from atoll.launch.local import Tokens
from benchmarks.report import Bar, report, show
from benchmarks.slow_link import Side, check, slow_link

TOKENS = Tokens("benchmark-worker-token", "benchmark-admin-token")
MEGABITS = 100
MODEL = {"layers": 8, "heads": 8, "width": 224}  # 5.0 M parameters with vocab 256
# Inner steps of 75 to 260 ms make sync wait 30 to 60 % at H = 32; this gives 150 to 200 here.
BLOCK = 96
FRAGMENTS, DELAY = 4, 6
SAVED_AIM = 0.8
WAIT_AIMS = (0.3, 0.6)  # else the run is not the one whose waiting is to be saved
COMPUTE_RATIOS = (0.9, 1.25)  # of streaming to sync, on a machine without other work
LIMIT_SECONDS = 1200.0
RUN_FILE = """
name = "overlap-benchmark"
sync_every = {every}
{mode}
heartbeat_interval = 1.0
heartbeat_timeout = 30.0
[model]
architecture = "gpt"
vocab = 256
block = {block}
layers = {layers}
heads = {heads}
width = {width}
[data]
kind = "synthetic"
seed = 1
rows = 100000
held_out_rows = 1
block = {block}
[inner]
batch = 4
threads = 1
[outer]
optimizer = "nesterov"
[upload]
codec = "{codec}"
[download]
codec = "{codec}"
[evaluate]
every = 0
[stop]
rounds = {rounds}
[storage]
snapshot_every = 1000000
"""
STREAMING = f"""
mode = "streaming"
num_fragments = {FRAGMENTS}
delay_steps = {DELAY}
"""


@dataclass(frozen=True)
class Setting:
    """What sync and streaming are compared at."""

    name: str
    every: int
    codec: str = "fp32"

    def text(self, *, streaming: bool, cycles: int) -> str:
        """The run file of so many cycles."""
        return RUN_FILE.format(
            every=self.every,
            codec=self.codec,
            mode=STREAMING if streaming else "",
            rounds=cycles * (FRAGMENTS if streaming else 1),
            block=BLOCK,
            **MODEL,
        )


MAIN = Setting("H32", 32)
REPORTED = (Setting("H32-int4", 32, "int4"), Setting("H128", 128))


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """What is started meanwhile stays on that core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def two_cores() -> tuple[int, int]:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit(f"only core {cores[0]} may be used; coordinator and island need one each")
    return cores[0], cores[1]


def run_steps(text: str, sides: tuple[Side, Side]) -> tuple[list[list[float]], dict[str, Any]]:
    """Makes a whole run; what was measured of each step, and what the island told at its end."""
    for_coordinator, for_island = two_cores()
    with tempfile.TemporaryDirectory(prefix="atoll-overlap-", dir=".") as made:
        home = Path(made).absolute()
        run_file, steps_file = home / "run.toml", home / "steps.json"
        run_file.write_text(text)
        os.environ["ATOLL_STEPS_FILE"] = str(steps_file)
        python = (sys.executable, "-m")
        processes: list[local.LocalProcess] = []
        try:
            with on_core(for_coordinator):
                coordinator = local.start_coordinator(
                    run_file,
                    home / "c",
                    tokens=TOKENS,
                    options=("--host", sides[0].address),
                    program=(*sides[0].program, *python, "atoll"),
                )
            processes.append(coordinator)
            coordinator.wait_ready(timeout_seconds=120.0)
            assert coordinator.fingerprint is not None, "an address off loopback has TLS"
            with on_core(for_island):
                island = local.start_island(
                    coordinator.url,
                    home / "i",
                    worker_id="island",
                    tokens=TOKENS,
                    options=("--fingerprint", coordinator.fingerprint),
                    program=(*sides[1].program, *python, "benchmarks.overlap_island"),
                )
            processes.append(island)
            code = island.wait(timeout_seconds=LIMIT_SECONDS)
            assert code == 0, island.log_tail() + coordinator.log_tail()
            coordinator.wait(timeout_seconds=60.0)
            return json.loads(steps_file.read_text()), island.result()
        finally:
            for process in processes:
                if process.is_running():
                    process.kill()


def times_of(steps: list[list[float]], *, every: int) -> dict[str, Any]:
    """Medians over the cycles but the first, and the last, which nothing follows; in seconds."""
    began = [start for start, *_ in steps]
    spent = [stop - start for start, stop, *_ in steps]
    busy = [used for *_, used, _ in steps]
    whole = [used for *_, used in steps]
    firsts = range(every, len(steps) - every, every)
    cycles = [began[i + every] - began[i] for i in firsts]
    computes = [sum(spent[i : i + every]) for i in firsts]
    trains = [sum(busy[i : i + every]) for i in firsts]
    others = [whole[i + every] - whole[i] - used for i, used in zip(firsts, trains, strict=True)]
    waits = [cycle - compute for cycle, compute in zip(cycles, computes, strict=True)]
    cycle = statistics.median(cycles)
    return {
        "cycle_seconds": cycle,
        "compute_seconds": statistics.median(computes),
        "wait_seconds": statistics.median(waits),
        "step_milliseconds": 1000 * cycle / every,
        "wait_fraction": statistics.median(w / c for w, c in zip(waits, cycles, strict=True)),
        # What a busy machine changes less; the second is what transfers take from the training.
        "processor_seconds": {
            "steps": statistics.median(trains),
            "beside them": statistics.median(others),
        },
        "cycles": cycles,
        "waits": waits,
    }


def measure(setting: Setting, sides: tuple[Side, Side], *, cycles: int) -> dict[str, Any]:
    """sync and streaming, one after the other, and what the second saved."""
    found: dict[str, Any] = {}
    for mode in ("sync", "streaming"):
        text = setting.text(streaming=mode == "streaming", cycles=cycles)
        steps, told = run_steps(text, sides)
        bytes_moved = {name: told[name] for name in ("bytes_sent", "bytes_received")}
        found[mode] = {**times_of(steps, every=setting.every), **bytes_moved}
        sys.stderr.write(f"{setting.name} {mode}: {_line(found[mode])}\n")
    sync, streaming = found["sync"], found["streaming"]
    at_most = min(sync["wait_seconds"], sync["compute_seconds"])
    found["saved"] = (sync["cycle_seconds"] - streaming["cycle_seconds"]) / at_most
    found["compute_ratio"] = streaming["compute_seconds"] / sync["compute_seconds"]
    sys.stderr.write(f"{setting.name}: {_verdict(found)}\n")
    return {"setting": setting.name, **found}


def _line(found: dict[str, Any]) -> str:
    return (
        f"step {found['step_milliseconds']:.0f} ms with all it waits for; a cycle computes "
        f"{found['compute_seconds']:.2f} s and waits {found['wait_seconds']:.2f} s "
        f"({100 * found['wait_fraction']:.0f} %); processor: "
        f"steps {found['processor_seconds']['steps']:.2f} s, "
        f"beside them {found['processor_seconds']['beside them']:.2f} s"
    )


def _verdict(found: dict[str, Any]) -> str:
    """What was saved, and that it tells nothing where other work changed the compute meanwhile.

    Both compute the same; streaming's also has to share the core with what it sends. Nothing saves
    more than a perfect overlap.
    """
    told = f"saved {found['saved']:.2f} of what can be"
    least, most = COMPUTE_RATIOS
    if found["saved"] > 1 or not least <= found["compute_ratio"] <= most:
        told += f"; of no worth: compute is {found['compute_ratio']:.2f} of sync's, others ran"
    return told


def bars_of(found: list[dict[str, Any]]) -> list[Bar]:
    waiting = statistics.median(one["sync"]["wait_fraction"] for one in found)
    least, most = WAIT_AIMS
    return [
        Bar("sync waits, part of a cycle at H = 32", waiting, least, at_least=True),
        Bar("sync waits, part of a cycle at H = 32", waiting, most),
        Bar(
            "saved by streaming, of what can be",
            statistics.median(one["saved"] for one in found),
            SAVED_AIM,
            at_least=True,
        ),
    ]


def main() -> None:
    names = [MAIN.name, *(setting.name for setting in REPORTED)]
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--json", action="store_true")
    arguments.add_argument("--cycles", type=int, default=6, help="of one run; at least 3")
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--only", action="append", choices=names)
    given = arguments.parse_args()
    if given.cycles < 3:
        raise SystemExit(f"--cycles {given.cycles} leaves none between the first and the last")
    check()
    wanted = given.only or names
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by a signal"))  # and clean up
    with slow_link(megabits=MEGABITS) as sides:
        repeats = given.repeats if MAIN.name in wanted else 0
        compared = [measure(MAIN, sides, cycles=given.cycles) for _ in range(repeats)]
        others = [
            measure(setting, sides, cycles=given.cycles)
            for setting in REPORTED
            if setting.name in wanted
        ]
    results = {
        "megabits": MEGABITS,
        "fragments": FRAGMENTS,
        "delay_steps": DELAY,
        "compared": compared,
        "reported": others,
    }
    show(report(results, bars_of(compared) if compared else []), as_json=given.json)
    if not given.json:
        for one in (*compared, *others):
            for mode in ("sync", "streaming"):
                sys.stdout.write(f"{one['setting']} {mode}: {_line(one[mode])}\n")
            sys.stdout.write(f"{one['setting']}: {_verdict(one)}\n")


if __name__ == "__main__":
    main()
