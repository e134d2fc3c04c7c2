"""Bytes reduced per second by an all-reduce of 100 MB, against gloo in the same run.

Ranks are processes on loopback, on one thread each. In turns, so that all ways meet the same
machine: gloo, and each of ours. A ratio is gloo's median time divided by ours: 1 is as fast as
gloo. Also the processor seconds of a rank, and its peak memory above what it held before.

    python -m benchmarks.collectives [--json] [--ranks 2 4] [--megabytes 100] [--repeats 9]
"""

import argparse
import datetime
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from atoll.clock import SystemClock
from atoll.collectives.base import Key
from atoll.collectives.exchange import CHUNK_BYTES, Way
from atoll.collectives.grpc.member import HELD_CHUNKS, RankMember
from atoll.collectives.grpc.server import RankServer
from atoll.collectives.grpc.trust import Identity, Member, RankGroup
from benchmarks.report import Bar, report, show

AIMS = {"grpc ring": 0.35}  # of gloo, from the issue
OURS: dict[str, tuple[Way, bool]] = {  # with TLS
    "grpc ring": ("ring", False),
    "grpc direct": ("direct", False),
    "grpc ring, TLS": ("ring", True),
}
MEMORY_ROOM_MB = 16.0
WARM_UP = 2
SECRET = "of the benchmark's own processes, on loopback"
Way_ = Callable[[torch.Tensor, int], None]  # a tensor and the number of the call
Call = tuple[float, float, float]


def rank_main(rank: int, size: int, home: str, elements: int, repeats: int) -> None:
    """One rank; rank 0 writes what it measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{home}/gloo", rank=rank, world_size=size)
    with ExitStack() as stack:
        ways: dict[str, Way_] = {"gloo": lambda values, _: dist.all_reduce(values)}
        for name, (kind, is_tls) in OURS.items():
            ways[name] = _own_way(stack, Path(home), rank, size, kind, is_tls=is_tls)
        values = torch.zeros(elements)
        found: dict[str, list[Call]] = {name: [] for name in ways}
        for number in range(WARM_UP + repeats):
            for name, way in ways.items():
                found[name].append(_measured(way, values, size, number))
        if rank == 0:
            Path(f"{home}/found.json").write_text(json.dumps(found))
        dist.barrier()
    dist.destroy_process_group()


def _own_way(
    stack: ExitStack,
    home: Path,
    rank: int,
    size: int,
    way: Way,
    *,
    is_tls: bool,
) -> Way_:
    identity = Identity.new(now=datetime.datetime.now(datetime.UTC)) if is_tls else None
    server = RankServer("127.0.0.1:0", identity=identity)
    stack.callback(server.close)
    shown = identity.certificate_pem.decode() if identity else ""
    (home / f"rank-{rank}.json").write_text(json.dumps([server.address, shown]))
    dist.barrier()
    told = [json.loads((home / f"rank-{k}.json").read_text()) for k in range(size)]
    dist.barrier()  # before the next way writes its own
    members = [Member(f"w{k}", address, pem.encode()) for k, (address, pem) in enumerate(told)]
    group = RankGroup(1, tuple(members), SECRET)
    member = stack.enter_context(
        RankMember(group, rank, server, clock=SystemClock(), identity=identity, way=way)
    )
    return lambda values, number: member.all_reduce(
        Key(group=1, step=number, op="reduce"), values
    ).wait()


def _measured(way: Way_, values: torch.Tensor, size: int, number: int) -> Call:
    """Wall seconds, processor seconds and how many MB memory rose, of one call."""
    values.fill_(1.0)
    before = _resident_mb()
    _forget_peak()
    dist.barrier()
    used, began = _used(), time.perf_counter()
    way(values, number)
    taken = time.perf_counter() - began, _used() - used, _peak_mb() - before
    if values[0] != size or values[-1] != size:
        raise SystemExit(f"the sum is {values[0]} and {values[-1]}; it must be {size}")
    return taken


def _used() -> float:
    found = resource.getrusage(resource.RUSAGE_SELF)
    return found.ru_utime + found.ru_stime


def _status_mb(name: str) -> float:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if name in x)
    return int(line.split()[1]) / 1000


def _resident_mb() -> float:
    return _status_mb("VmRSS")


def _peak_mb() -> float:
    return _status_mb("VmHWM")


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def run(size: int, *, elements: int, repeats: int) -> dict[str, Any]:
    """All ways at one number of ranks, in turns."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as home:
        processes = [
            context.Process(target=rank_main, args=(rank, size, home, elements, repeats))
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit(f"a rank of {size} ended with an error; see above")
        calls: dict[str, list[Call]] = json.loads(Path(f"{home}/found.json").read_text())
    found = {}
    for name, measured in calls.items():
        seconds, used, memory = zip(*measured[WARM_UP:], strict=True)
        found[name] = {
            "seconds": seconds,
            "median_seconds": statistics.median(seconds),
            "median_processor_seconds": statistics.median(used),
            "peak_memory_mb": max(memory),
        }
    gloo = found["gloo"]["median_seconds"]
    for one in found.values():
        one["times_gloo"] = gloo / one["median_seconds"]
    return {"ranks": size, "ways": found}


def bars(results: list[dict[str, Any]]) -> list[Bar]:
    made = []
    for one in results:
        size, ways = one["ranks"], one["ways"]
        for name, aim in AIMS.items():
            told = f"{name}, {size} ranks: part of gloo's bytes/s"
            made.append(Bar(told, ways[name]["times_gloo"], aim, at_least=True))
        room = MEMORY_ROOM_MB + HELD_CHUNKS * CHUNK_BYTES / 1e6 * (size - 1)
        peak = max(way["peak_memory_mb"] for name, way in ways.items() if name != "gloo")
        made.append(Bar(f"memory above the tensors, {size} ranks, MB", peak, room))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args()
    results = []
    for size in given.ranks:
        sys.stderr.write(f"{size} ranks\n")
        results.append(run(size, elements=given.megabytes * 1_000_000 // 4, repeats=given.repeats))
        for name, way in results[-1]["ways"].items():
            sys.stderr.write(
                f"  {name:16s} {way['median_seconds']:.3f} s, {way['times_gloo']:.2f} of gloo, "
                f"{way['median_processor_seconds']:.3f} processor s, "
                f"{way['peak_memory_mb']:.0f} MB\n"
            )
    show(report(results, bars(results)), as_json=given.json)


if __name__ == "__main__":
    main()
