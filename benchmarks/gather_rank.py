"""One rank of `benchmarks.gather`, a process of its own: runs a window again and again.

Forked from `gather_warm`, so its loops are compiled. The ranks meet by gloo; each window begins at
a barrier, from which the clocks run. Every time the weights are those before the window, and spool
and archive are new.
"""

import ctypes
import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from atoll.blobs.s3_bucket import S3Bucket
from atoll.collectives.base import Collectives
from atoll.collectives.local import LocalGroup
from atoll.collectives.runners import Inline
from atoll.collectives.torch_dist import TorchRanks, gloo_group
from atoll.compiled.base import compiled
from atoll.gather.archive import Archive
from atoll.gather.catch_up import CatchUp
from atoll.gather.replica import Replica
from atoll.gather.spool import Part
from atoll.gather.turns import Turns
from atoll.gather.window import Window
from benchmarks.gather_world import CLOCK, EMITTER, World, access
from tests.servers import BUCKET

LIMIT_SECONDS = 300.0
_MMAP_THRESHOLD, _ARENA_MAX = -3, -8  # malloc.h
Kind = Literal["window", "recorded", "catch-up"]
_BARRIERS = 3  # the group of this module's own collectives


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What one rank is told."""

    rank: int
    size: int
    home: str
    world: dict[str, Any]
    endpoint: str
    repeats: int = 1
    has_archive: bool = False
    measures_memory: bool = False
    part: Kind = "window"  # what is measured; the others are of an archive of that name
    archive: str = ""
    mutant: str = ""  # "holds payloads": what a test of the measuring must find
    warm: dict[str, Any] | None = None  # a small world of objects that are there, too

    def as_json(self) -> str:
        return json.dumps(asdict(self))


@contextmanager
def joined(setting: Setting) -> Iterator[Collectives]:
    """This process among the ranks."""
    if setting.size == 1:
        yield LocalGroup(1, clock=CLOCK).rank(0, Inline(), way="direct")
        return
    dist.init_process_group(
        "gloo",
        init_method=f"file://{setting.home}/gloo",
        rank=setting.rank,
        world_size=setting.size,
        timeout=timedelta(seconds=LIMIT_SECONDS),
    )
    made = TorchRanks(gloo_group(timeout_seconds=LIMIT_SECONDS), timeout_seconds=LIMIT_SECONDS)
    try:
        yield made
    finally:
        made.close()
        dist.destroy_process_group()


class Rank:
    """What is the same in every window."""

    def __init__(self, setting: Setting, ranks: Collectives, bucket: S3Bucket) -> None:
        self._setting, self._ranks, self._bucket = setting, ranks, bucket
        self._turns = Turns(_BARRIERS, 0)

    def _at_first(self, world: World) -> Replica:
        own = world.terms().owners(self._ranks.size)[self._ranks.rank]
        return Replica(master=torch.ones(len(own)), window=0, digest=world.base_digest)

    def _window(self, world: World, name: str, replica: Replica, *, has_archive: bool) -> Window:
        rank = self._ranks.rank
        return Window(
            ranks=self._ranks,
            buckets={"main": self._bucket},
            clock=CLOCK,
            directory=Path(self._setting.home) / f"{world.folder}-{name}-{rank}",
            terms=world.terms(),
            replica=replica,
            archive=world.archive(self._bucket, f"archive-{name}") if has_archive else None,
            key=EMITTER if rank == 0 else None,
        )

    def window(self, world: World, name: str, *, has_archive: bool) -> dict[str, Any]:
        """One window from the barrier on."""
        rank, replica = self._ranks.rank, self._at_first(world)
        window = self._window(world, name, replica, has_archive=has_archive)
        self._ranks.barrier(self._turns.next("control")).wait()
        forget()
        before, used, began = highest(), time.process_time(), CLOCK.now()
        merged = window.run(0)
        seconds = CLOCK.now() - began
        return {
            "rank": rank,
            "began": began,  # by a clock that all processes of a machine share
            "window_seconds": seconds,
            "gather_seconds": merged.time,
            "processor_seconds": time.process_time() - used,
            "peak_mb": (highest() - before) / 2**20,
            "digest": replica.digest,
            "accepted": len(merged.uids),
            "skipped": {uid: str(reason) for uid, reason in merged.reasons.items()},
            "is_compiled": compiled.ready_for_any(),
        }

    def recorded(self, world: World, name: str) -> dict[str, Any]:
        """Two windows in an archive, not measured; one rank."""
        replica = self._at_first(world)
        self._window(world, name, replica, has_archive=True).run(0)
        later = replace(world, window=1, base_digest=replica.digest)
        later.publish(self._bucket)
        merged = self._window(later, name, replica, has_archive=True).run(1)
        return {"digest": replica.digest, "accepted": len(merged.uids)}

    def catch_up(self, world: World, name: str) -> dict[str, Any]:
        """Them from the archive, the second fetched while the first is applied; one rank."""
        replica, terms = self._at_first(world), world.terms()
        by = CatchUp(
            ranks=self._ranks,
            archive=world.archive(self._bucket, f"archive-{name}"),
            optimizer=terms.optimizer,
            trust=terms.trust,
            memory_bytes=terms.memory_bytes,
            directory=Path(self._setting.home) / f"{world.folder}-{name}-late",
        )
        forget()
        before, began = highest(), CLOCK.now()
        found = by.run(replica)
        return {
            "catch_up_seconds": CLOCK.now() - began,
            "body_bytes": found.bytes,
            "peak_mb": (highest() - before) / 2**20,
            "digest": replica.digest,
            "applied": found.applied,
        }


def highest() -> int:
    """The most resident bytes since `forget`; not ru_maxrss, which is the parent's at first."""
    [line] = [one for one in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in one]
    return int(line.split()[1]) * 1024


def forget() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def give_back_at_once() -> None:
    """Freed memory goes back to the system, so that the highest mark is what was held."""
    libc = ctypes.CDLL(None)
    for option, value in ((_MMAP_THRESHOLD, 64 << 10), (_ARENA_MAX, 1)):
        assert libc.mallopt(option, value) == 1, option


def hold_payloads() -> None:
    """As a rank would that keeps in memory what it has fetched, of peers or of an archive."""
    held: list[bytes] = []
    written, stream = Part.write, Archive.stream

    def write(self: Part, piece: memoryview) -> None:
        held.append(bytes(piece))
        written(self, piece)

    def streams(
        self: Archive, key: str, nbytes: int, start: int, stop: int
    ) -> Iterator[memoryview]:
        for piece in stream(self, key, nbytes, start, stop):
            held.append(bytes(piece))
            yield piece

    # The point of the mutant.
    Part.write = write  # type: ignore[method-assign]
    Archive.stream = streams  # type: ignore[method-assign]


def process(text: str) -> None:
    """The whole life of a rank; what it found is in a file of its home."""
    setting = Setting(**json.loads(text))
    torch.set_num_threads(1)
    if setting.measures_memory:
        give_back_at_once()
    if setting.mutant:
        hold_payloads()
    world = World(**setting.world)
    with ExitStack() as stack:
        ranks = stack.enter_context(joined(setting))
        bucket = stack.enter_context(S3Bucket(BUCKET, access(setting.endpoint), CLOCK))
        rank = Rank(setting, ranks, bucket)

        def once(world: World, name: str) -> dict[str, Any]:
            if setting.part == "recorded":
                return rank.recorded(world, setting.archive)
            if setting.part == "catch-up":
                return rank.catch_up(world, setting.archive)
            return rank.window(world, name, has_archive=setting.has_archive)

        if setting.warm is not None:  # whatever loads late has loaded
            once(World(**setting.warm), "warm")
        base = os.path.basename(setting.home)
        found = [
            once(world, f"{setting.size}-{base}-{number}") for number in range(setting.repeats)
        ]
    (Path(setting.home) / f"found-{setting.rank}.json").write_text(json.dumps(found))
