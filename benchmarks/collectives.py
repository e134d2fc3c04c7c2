"""Bytes reduced per second by an all-reduce of 100 MB, against gloo in the same run.

Ranks are processes on one thread each: two or four on loopback, and two in network namespaces
whose link carries 1 Gbit/s or 100 Mbit/s (needs root; skipped with `--no-links`). In turns, so that
all ways meet the same machine. A ratio is gloo's median time divided by ours: 1 is as fast as gloo.
Also processor seconds of rank 0, the most memory that any rank took above its tensors, what
rounding to int8 costs in error, and residuals in time and memory.

    python -m benchmarks.collectives [--json] [--ranks 2 4] [--megabytes 100] [--repeats 7]
                                     [--no-links] [--only WAY ...]
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from json import loads
from pathlib import Path
from typing import Any

from atoll.collectives.exchange import CHUNK_BYTES
from atoll.collectives.grpc.member import HELD_CHUNKS
from benchmarks.collectives_rank import VARIANTS, Setting
from benchmarks.report import Bar, report, show
from benchmarks.slow_link import DEVICE, Side, slow_link

# Parts of gloo's bytes a second, from the issue.
AIMS = {"grpc ring": 0.35, "grpc int8 direct": 0.4, "tcp ring": 0.8, "tcp int8 direct": 0.5}
LINK_AIMS = {1_000: 2.5, 100: 3.5}  # by megabits a second
LINK_WAYS = ("grpc int8 direct", "tcp int8 direct")
LINK_REPEATS = 3
ROOM_BYTES = 16 << 20  # above the chunks of each peer
WARM_UP = 2
LIMIT_SECONDS = 500.0
LOOPBACK = Side("", "127.0.0.1")


def offered(ways: Sequence[str]) -> tuple[str, ...]:
    """Those that can be measured."""
    return tuple(name for name in ways if VARIANTS[name].missing is None)


def run(sides: Sequence[Side], ways: Sequence[str], *, elements: int, repeats: int) -> Any:
    """All ways with one rank on each side; what each rank found."""
    with tempfile.TemporaryDirectory() as home, ExitStack() as stack:
        started = []
        for rank, side in enumerate(sides):
            setting = Setting(
                rank=rank,
                size=len(sides),
                home=home,
                elements=elements,
                repeats=repeats,
                warm_up=WARM_UP,
                ways=tuple(ways),
                address=side.address,
            )
            inside = side.program if side.namespace else ()
            device = {"GLOO_SOCKET_IFNAME": DEVICE} if side.namespace else {}
            words = [*inside, sys.executable, "-m", "benchmarks.collectives_rank"]
            process = subprocess.Popen(
                [*words, setting.as_json()], env={**os.environ, **device, "OMP_NUM_THREADS": "1"}
            )
            stack.callback(_ended, process)
            started.append(process)
        for process in started:
            if process.wait(LIMIT_SECONDS):
                raise SystemExit(f"a rank of {len(sides)} ended with an error; see above")
        return [loads(Path(home, f"found-{k}.json").read_text()) for k in range(len(sides))]


def _ended(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


def summary(found: list[dict[str, Any]], *, size: int) -> dict[str, Any]:
    """Medians and ratios; times are rank 0's, memory is the most of any rank's."""
    ways: dict[str, Any] = {}
    for name, calls in found[0]["calls"].items():
        kept = calls[WARM_UP:]
        everywhere = [call for rank in found for call in rank["calls"][name][WARM_UP:]]
        ways[name] = {
            "seconds": [call["seconds"] for call in kept],
            "median_seconds": statistics.median(call["seconds"] for call in kept),
            "median_processor_seconds": statistics.median(c["processor_seconds"] for c in kept),
            "peak_memory_mb": max(call["rose_mb"] for call in everywhere),
        }
    gloo = ways["gloo"]["median_seconds"]
    for one in ways.values():
        one["times_gloo"] = gloo / one["median_seconds"]
    rest: dict[str, Any] = {name: one for name, one in found[0].items() if name != "calls"}
    return {"ranks": size, "ways": ways, **rest}


def bars(results: list[dict[str, Any]]) -> list[Bar]:
    made = []
    for one in results:
        size, ways, megabits = one["ranks"], one["ways"], one.get("megabits")
        if megabits is not None:
            for name in LINK_WAYS:
                if name in ways:
                    told = f"{name}, {megabits} Mbit/s: times gloo fp32"
                    made.append(
                        Bar(told, ways[name]["times_gloo"], LINK_AIMS[megabits], at_least=True)
                    )
            continue
        for name, aim in AIMS.items():
            if name in ways:
                told = f"{name}, {size} ranks: part of gloo's bytes/s"
                made.append(Bar(told, ways[name]["times_gloo"], aim, at_least=True))
        room = (ROOM_BYTES + HELD_CHUNKS * CHUNK_BYTES * (size - 1)) / 1e6
        # TLS is reported, in time and memory: gRPC's own buffers are most of it.
        held = [one["peak_memory_mb"] for name, one in ways.items() if _is_plain(name)]
        peak = max(held, default=0.0)
        made.append(Bar(f"memory above the tensors, {size} ranks, MB", peak, room))
    return made


def _is_plain(name: str) -> bool:
    return name in VARIANTS and not VARIANTS[name].is_tls


def tell(one: dict[str, Any]) -> None:
    """A result for people, while the next is measured."""
    link = f", {one['megabits']} Mbit/s" if "megabits" in one else ""
    sys.stderr.write(f"{one['ranks']} ranks{link}\n")
    for name, way in one["ways"].items():
        error = f", error {one['errors'][name]:.2e}" if name in one["errors"] else ""
        sys.stderr.write(
            f"  {name:18s} {way['median_seconds']:.3f} s, {way['times_gloo']:.2f} of gloo, "
            f"{way['median_processor_seconds']:.3f} processor s, "
            f"{way['peak_memory_mb']:.0f} MB{error}\n"
        )
    if "residuals" in one:
        took = {name: min(x) for name, x in one["residuals"]["seconds"].items()}
        sys.stderr.write(
            f"  residuals: {took['with']:.3f} s for {took['without']:.3f} s of an int8 reduction, "
            f"{one['residuals']['bytes_per_value_on_every_rank']} bytes for each value of the "
            f"whole model on every rank\n"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--no-links", action="store_true")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by a signal"))  # and clean up
    elements = given.megabytes * 1_000_000 // 4
    results: list[dict[str, Any]] = []

    def measure(sides: Sequence[Side], ways: Sequence[str], repeats: int, **about: int) -> None:
        found = run(sides, offered(ways), elements=elements, repeats=repeats)
        results.append({**summary(found, size=len(sides)), **about})
        tell(results[-1])

    for size in given.ranks:
        measure([LOOPBACK] * size, given.only, given.repeats)
    for megabits in () if given.no_links else LINK_AIMS:
        with slow_link(megabits=megabits) as sides:
            ways = [name for name in LINK_WAYS if name in given.only]
            measure(sides, ways, LINK_REPEATS, megabits=megabits)
    skipped = {name: VARIANTS[name].missing for name in given.only if VARIANTS[name].missing}
    show(report({"measured": results, "skipped": skipped}, bars(results)), as_json=given.json)


if __name__ == "__main__":
    main()
