"""Groups of ranks as processes, each with its own address at the S3 server or a proxy of it.

Ends every process that it started, by its pid.
"""

import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import gather_rank
from benchmarks.gather_rank import LIMIT_SECONDS, Kind, Setting
from benchmarks.gather_world import World

WARM = "benchmarks.gather_warm"
Found = list[list[dict[str, Any]]]  # by rank, by repeat


@contextmanager
def started(settings: Sequence[Setting], *, preload: str = WARM) -> Iterator[list[Any]]:
    """Processes of ranks; those that are left when the block ends are killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload])
    processes: list[Any] = []
    try:
        for setting in settings:
            one = context.Process(
                target=gather_rank.process, args=(setting.as_json(),), daemon=True
            )
            one.start()
            processes.append(one)
        yield processes
    finally:
        for one in processes:
            one.kill()
            one.join()


def ran(
    world: World,
    endpoints: Sequence[str],
    *,
    repeats: int = 1,
    has_archive: bool = False,
    warm: World | None = None,
    meanwhile: Callable[[], None] = lambda: None,
    measures_memory: bool = False,
    part: Kind = "window",
    archive: str = "",
    mutant: str = "",
    preload: str = WARM,
) -> Found:
    """What every rank found, one rank for each of `endpoints`; SystemExit where one fails."""
    with tempfile.TemporaryDirectory(prefix="gather-") as home:
        settings = [
            Setting(
                rank=rank,
                size=len(endpoints),
                home=home,
                world=asdict(world),
                endpoint=endpoint,
                repeats=repeats,
                has_archive=has_archive,
                measures_memory=measures_memory,
                part=part,
                archive=archive,
                mutant=mutant,
                warm=None if warm is None else asdict(warm),
            )
            for rank, endpoint in enumerate(endpoints)
        ]
        with started(settings, preload=preload) as processes:
            meanwhile()
            for rank, process in enumerate(processes):
                process.join(LIMIT_SECONDS)
                if process.exitcode != 0:
                    raise SystemExit(f"rank {rank} ended with {process.exitcode}; see above")
        paths = [Path(home) / f"found-{rank}.json" for rank in range(len(endpoints))]
        found = [json.loads(path.read_text()) for path in paths]
        _check(found)
        return found


def _check(found: Found) -> None:
    """The same weights on all ranks, every time."""
    digests = {one["digest"] for rank in found for one in rank}
    assert len(digests) == 1, digests


def slowest(found: Found, name: str) -> list[float]:
    """Of each repeat what the slowest rank took."""
    return [max(one[name] for one in repeat) for repeat in zip(*found, strict=True)]


def told(found: Found) -> dict[str, Any]:
    """A group's figures: medians of its repeats, each of its slowest rank."""
    names = ("gather_seconds", "window_seconds", "processor_seconds")
    taken = {name: slowest(found, name) for name in names}
    return {
        "ranks": len(found),
        "accepted": found[0][0]["accepted"],
        "is_compiled": all(one["is_compiled"] for rank in found for one in rank),
        **{name: median(values) for name, values in taken.items()},
        "all": taken,
    }


def waited(condition: Callable[[], bool], *, seconds: float) -> None:
    """Returns once the condition holds; SystemExit when it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"what the benchmark waits for did not come within {seconds} s")
        time.sleep(0.02)
