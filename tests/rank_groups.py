"""Groups of ranks on every transport that fits into one process, and numbers for them to add."""

import datetime
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from atoll.clock import SystemClock
from atoll.collectives.base import Collectives, Key
from atoll.collectives.exchange import Way
from atoll.collectives.grpc.member import Bulk, RankMember
from atoll.collectives.grpc.server import RankServer
from atoll.collectives.grpc.trust import Identity, Member, RankGroup
from atoll.collectives.local import LocalGroup
from atoll.collectives.runners import Inline, Threaded
from atoll.simulate.fibers import Scheduler

CHUNK_BYTES = 1_024
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int8, torch.int32, torch.int64, torch.uint8),
)
Work = Callable[[Collectives], Any]


def threads(
    size: int,
    way: Way,
    work: Work,
    *,
    timeout_seconds: float = 30.0,
    chunk_bytes: int = CHUNK_BYTES,
    is_inline: bool = False,
) -> list[Any]:
    """What each rank's work returned, each rank a thread with another for its collectives.

    `is_inline`: without that other one.
    """
    group = LocalGroup(size, clock=SystemClock())

    @contextmanager
    def rank(number: int) -> Iterator[Collectives]:
        runner = Inline() if is_inline else Threaded(f"rank-{number}")
        options: dict[str, Any] = {"timeout_seconds": timeout_seconds, "chunk_bytes": chunk_bytes}
        try:
            yield group.rank(number, runner, way=way, **options)
        finally:
            runner.close()

    with ExitStack() as stack, ThreadPoolExecutor(size) as pool:
        ranks = [stack.enter_context(rank(number)) for number in range(size)]
        return [made.result() for made in [pool.submit(work, one) for one in ranks]]


def fibers(
    size: int,
    way: Way,
    work: Work,
    *,
    timeout_seconds: float = 30.0,
    chunk_bytes: int = CHUNK_BYTES,
) -> list[Any]:
    """The same in fibers on a virtual clock, without a thread beside them."""
    scheduler = Scheduler()
    group = LocalGroup(size, clock=scheduler)
    found: dict[int, Any] = {}

    def run(number: int) -> None:
        options: dict[str, Any] = {"timeout_seconds": timeout_seconds, "chunk_bytes": chunk_bytes}
        found[number] = work(group.rank(number, Inline(), way=way, **options))

    for number in range(size):
        scheduler.spawn(f"rank-{number}", partial(run, number))
    scheduler.run_until(lambda: len(found) == size, limit_seconds=1e6)
    return [found[number] for number in range(size)]


def over_grpc(
    size: int,
    way: Way,
    work: Work,
    *,
    timeout_seconds: float = 30.0,
    chunk_bytes: int = CHUNK_BYTES,
    is_trusting: bool = True,
    bulk: Bulk = "grpc",
) -> list[Any]:
    """The same between servers on loopback, each rank with its own."""
    options: dict[str, Any] = {"timeout_seconds": timeout_seconds, "chunk_bytes": chunk_bytes}
    options["bulk"] = bulk
    now = datetime.datetime.now(datetime.UTC)
    shown = [None if is_trusting else Identity.new(now=now) for _ in range(size)]
    with ExitStack() as stack, ThreadPoolExecutor(size) as pool:
        servers = [RankServer("127.0.0.1:0", identity=identity) for identity in shown]
        for server in servers:
            stack.callback(server.close)
        group = RankGroup(
            1,
            tuple(
                Member(f"w{k}", server.address, identity.certificate_pem if identity else b"")
                for k, (server, identity) in enumerate(zip(servers, shown, strict=True))
            ),
            "s" * 32,
        )
        ranks = [
            stack.enter_context(
                RankMember(group, k, server, clock=SystemClock(), identity=one, way=way, **options)
            )
            for k, (server, one) in enumerate(zip(servers, shown, strict=True))
        ]
        return [made.result() for made in [pool.submit(work, one) for one in ranks]]


TRANSPORTS: dict[str, Callable[..., list[Any]]] = {
    "local, threads": threads,
    "local, fibers": fibers,
    "grpc": over_grpc,
    "grpc with TLS": partial(over_grpc, is_trusting=False),
    "tcp": partial(over_grpc, bulk="tcp"),
    "tcp with TLS": partial(over_grpc, bulk="tcp", is_trusting=False),
}


def key(number: int = 0, **changes: Any) -> Key:
    return Key(**{"group": 1, "step": number, "op": "reduce", **changes})


def values(rank: int, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of very different sizes, so that another order of adding shows."""
    made = torch.Generator().manual_seed(100 + rank)
    found = torch.randn(length, generator=made, dtype=torch.float64)
    scale = torch.randint(-6, 7, (length,), generator=made).double()
    if dtype.is_floating_point:
        return (found * torch.pow(2.0, scale)).to(dtype)
    return (found * 20).to(torch.int64).to(dtype)


def added(part: int, size: int, length: int, dtype: torch.dtype) -> Tensor:
    """The SUM of all ranks' values as the canonical order has it, by plain additions."""
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    first, *rest = [values((part + 1 + k) % size, length, dtype).to(wide) for k in range(size)]
    for one in rest:
        first = first + one
    return first.to(dtype)


def sums(size: int, length: int, dtype: torch.dtype) -> list[Tensor]:
    """Each rank's part of the SUM."""
    bounds = [k * length // size for k in range(size + 1)]
    return [added(k, size, length, dtype)[bounds[k] : bounds[k + 1]] for k in range(size)]


def equal(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    pairs = zip(found, wanted, strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
