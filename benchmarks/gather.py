"""What a gather must show, on a real S3 server, with ranks that are processes: one command.

    python -m benchmarks.gather [--json] [--only PART ...] [--repeats 3]

    overlap    shared places of 20 peers against the all-pairs way
    size       bytes of an object and its statement at 25 M parameters
    cost       20 peers of 25 M parameters fetched, validated, compared, applied: one core
    step       the coordinator's outer step at 20 x 25 M, and a start that makes artifacts again
    ranks      a token bucket of 1 MB/s for each of 1, 2 and 4 ranks, about 10 s at one
    shared     one token bucket of 3 MB/s for 4 ranks
    processor  no proxy, one thread a rank, 5 s or more at one: 2 ranks
    memory     whole windows: peak above libraries, loops and own tiles
    catch-up   two windows from the archive: peak as above
    slow       every third peer at 1 KB/s: the others' time against their time alone
    away       the server is killed in the middle and started again after 10 s

Times are medians, each of the slowest rank, from the barrier at which the ranks begin. A proxy
counts the bytes of every object: none may come twice but of a piece that broke.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import gather_faults, gather_lines, gather_overlap, gather_step
from benchmarks.gather_bench import Bench
from benchmarks.report import Bar, report, show
from tests.servers import Servers

Measured = tuple[dict[str, Any], list[Bar]]

PARTS: dict[str, Callable[[Bench], Measured]] = {
    "overlap": lambda _: gather_overlap.measured(),
    "size": gather_lines.size,
    "cost": gather_lines.cost,
    "step": lambda bench: (gather_step.measured(repeats=bench.repeats), []),
    "ranks": gather_lines.ranks,
    "shared": gather_lines.shared,
    "processor": gather_lines.processor,
    "memory": gather_lines.memory,
    "catch-up": gather_lines.catch_up,
    "slow": gather_faults.slow,
    "away": gather_faults.away,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    results: dict[str, Any] = {}
    bars: list[Bar] = []
    with tempfile.TemporaryDirectory(prefix="gather-bench-") as home:
        servers = Servers(Path(home), owner_pid=os.getpid())
        try:
            with Bench(servers, repeats=given.repeats) as bench:
                for name in given.only:
                    begun = time.monotonic()
                    results[name], found = PARTS[name](bench)
                    results[name]["seconds_of_this_part"] = time.monotonic() - begun
                    bars += found
                    sys.stderr.write(f"{name}: {time.monotonic() - begun:.0f} s\n")
                    for bar in found:
                        sys.stderr.write(f"  {bar.name}: {bar.value:.3f} (aim {bar.aim:g})\n")
        finally:
            servers.stop()
    show(report(results, bars), as_json=given.json)


if __name__ == "__main__":
    main()
