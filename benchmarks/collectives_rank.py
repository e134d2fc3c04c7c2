"""One rank of `benchmarks.collectives`: measures all ways in turns and writes what it found.

    python -m benchmarks.collectives_rank SETTING

SETTING is `Setting` as JSON. The ranks meet by gloo, and by files in a folder.
"""

import datetime
import inspect
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from atoll.clock import SystemClock
from atoll.codecs.int8.codec import Int8
from atoll.collectives import schedule
from atoll.collectives.base import Collectives, Key
from atoll.collectives.codecs import WireCodec
from atoll.collectives.exchange import Way
from atoll.collectives.grpc.member import RankMember
from atoll.collectives.grpc.server import RankServer
from atoll.collectives.grpc.trust import Identity, Member, RankGroup
from atoll.compiled.base import LARGE_ELEMENTS, compiled

INT8 = WireCodec(Int8(rounding="stochastic"), seed=1)
SECRET = "of the benchmark's own processes, on this machine"
ERROR_ELEMENTS = 1 << 20  # of the exchange whose error is measured
TOLERANCE = 0.02  # of a sum that may be rounded to int8 twice


@dataclass(frozen=True)
class Variant:
    """How one of ours is set."""

    way: Way = "ring"
    bulk: str = "grpc"
    is_tls: bool = False
    is_int8: bool = False

    @property
    def missing(self) -> str | None:
        """Why it cannot be measured."""
        offers = "bulk" in inspect.signature(RankMember).parameters
        return None if self.bulk == "grpc" or offers else f"bulk={self.bulk!r} is not offered"


VARIANTS = {
    "grpc ring": Variant(),
    "grpc direct": Variant("direct"),
    "grpc int8 direct": Variant("direct", is_int8=True),
    "grpc int8 ring": Variant("ring", is_int8=True),
    "grpc ring, TLS": Variant(is_tls=True),
    "tcp ring": Variant(bulk="tcp"),
    "tcp int8 direct": Variant("direct", "tcp", is_int8=True),
}


@dataclass(frozen=True)
class Setting:
    """What one rank is told."""

    rank: int
    size: int
    home: str
    elements: int
    repeats: int
    warm_up: int
    ways: tuple[str, ...]  # gloo is measured in any case
    address: str = "127.0.0.1"

    def as_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Call:
    """What one call took on one rank."""

    seconds: float
    processor_seconds: float
    rose_mb: float  # of memory, above what was held before


Work = Callable[[int], None]  # the number of the call


class Rank:
    """The ranks of all ways in this process."""

    def __init__(self, setting: Setting, stack: ExitStack) -> None:
        self._setting = setting
        self._stack = stack
        self._home = Path(setting.home)

    def joined(self, name: str) -> Collectives:
        """A rank of the group of one way."""
        given, variant = self._setting, VARIANTS[name]
        now = datetime.datetime.now(datetime.UTC)
        identity = Identity.new(now=now) if variant.is_tls else None
        server = RankServer(f"{given.address}:0", identity=identity)
        self._stack.callback(server.close)
        shown = identity.certificate_pem.decode() if identity else ""
        mine = self._home / f"{name}-{given.rank}.json"
        mine.write_text(json.dumps([server.address, shown]))
        dist.barrier()
        told = [
            json.loads((self._home / f"{name}-{k}.json").read_text()) for k in range(given.size)
        ]
        members = [Member(f"w{k}", address, pem.encode()) for k, (address, pem) in enumerate(told)]
        options: dict[str, Any] = {} if variant.bulk == "grpc" else {"bulk": variant.bulk}
        return self._stack.enter_context(
            RankMember(
                RankGroup(1, tuple(members), SECRET),
                given.rank,
                server,
                clock=SystemClock(),
                identity=identity,
                way=variant.way,
                **options,
            )
        )


def measured(work: Work, number: int) -> Call:
    """One call, which all ranks begin together."""
    before = _status_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    dist.barrier()
    used, began = _used(), time.perf_counter()
    work(number)
    seconds, processor = time.perf_counter() - began, _used() - used
    return Call(seconds, processor, _status_mb("VmHWM") - before)


def in_turns(works: dict[str, Work], rounds: int, values: Tensor, size: int) -> dict[str, Any]:
    """All calls of each way; in turns, so that all meet the same machine."""
    found: dict[str, list[Call]] = {name: [] for name in works}
    for number in range(rounds):
        for name, work in works.items():
            values.fill_(1.0)
            found[name].append(measured(work, number))
            _check_sum(name, (values[0], values[-1]), size)
    return {name: [asdict(call) for call in calls] for name, calls in found.items()}


def _check_sum(name: str, some: Iterable[Tensor], size: int) -> None:
    for one in some:
        if abs(float(one) - size) > TOLERANCE * size:
            raise SystemExit(f"{name}: a sum is {float(one)}; it must be {size}")


def rounding_error(ranks: Collectives, *, number: int) -> float:
    """Relative L2 error of an int8 sum of normal numbers, of which each rank has its own."""
    made = [
        torch.randn(ERROR_ELEMENTS, generator=torch.Generator().manual_seed(rank))
        for rank in range(ranks.size)
    ]
    true = torch.stack(made).double().sum(dim=0)
    span = schedule.cut(ERROR_ELEMENTS, ranks.size)[ranks.rank]
    out = torch.empty(len(span))
    ranks.reduce_scatter(_key(number), made[ranks.rank], out, codec=INT8).wait()
    return float((out - span.of(true)).norm() / span.of(true).norm())


def residual_cost(ranks: Collectives, values: Tensor, *, first: int, rounds: int) -> dict[str, Any]:
    """What error feedback adds to an int8 reduction."""
    residual = torch.zeros(len(values), dtype=torch.bfloat16)
    out = torch.empty(len(schedule.cut(len(values), ranks.size)[ranks.rank]))

    def reduced(number: int, kept: Tensor | None) -> None:
        ranks.reduce_scatter(_key(number), values, out, codec=INT8, residual=kept).wait()

    works: dict[str, Work] = {
        "without": lambda number: reduced(first + 2 * number, None),
        "with": lambda number: reduced(first + 2 * number + 1, residual),
    }
    found: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds):
        for name, work in works.items():
            values.fill_(1.0)
            found[name].append(measured(work, number).seconds)
    return {"seconds": found, "bytes_per_value_on_every_rank": residual.element_size()}


def _key(number: int) -> Key:
    return Key(group=1, step=number, op="reduce")


def _used() -> float:
    found = resource.getrusage(resource.RUSAGE_SELF)
    return found.ru_utime + found.ru_stime


def _status_mb(name: str) -> float:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if name in x)
    return int(line.split()[1]) * 1024 / 1e6


def main() -> None:
    told = json.loads(sys.argv[1])
    given = Setting(**{**told, "ways": tuple(told["ways"])})
    torch.set_num_threads(1)
    compiled.prepare(LARGE_ELEMENTS)
    compiled.wait()
    dist.init_process_group(
        "gloo", init_method=f"file://{given.home}/gloo", rank=given.rank, world_size=given.size
    )
    with ExitStack() as stack:
        rank, values = Rank(given, stack), torch.zeros(given.elements)
        joined = {name: rank.joined(name) for name in given.ways}
        works: dict[str, Work] = {"gloo": lambda _: dist.all_reduce(values)}
        for name, ranks in joined.items():
            codec = INT8 if VARIANTS[name].is_int8 else None
            works[name] = lambda number, ranks=ranks, codec=codec: (  # type: ignore[misc]
                ranks.all_reduce(_key(number), values, codec=codec).wait()
            )
        rounds = given.warm_up + given.repeats
        found: dict[str, Any] = {
            "calls": in_turns(works, rounds, values, given.size),
            "loops_compiled": compiled.ready_for_any(),
            "errors": {
                name: rounding_error(ranks, number=rounds)
                for name, ranks in joined.items()
                if VARIANTS[name].is_int8
            },
        }
        if "grpc int8 direct" in joined and given.address == "127.0.0.1":
            found["residuals"] = residual_cost(
                joined["grpc int8 direct"], values, first=rounds + 1, rounds=3
            )
        (Path(given.home) / f"found-{given.rank}.json").write_text(json.dumps(found))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
