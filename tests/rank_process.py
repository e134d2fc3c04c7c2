"""Rank 1 of two in a process of its own, which a test stops and continues.

Says its address, hears the other's, then adds with it as often as it is told, over each carrier.
"""

import sys

import torch

from atoll.clock import SystemClock
from atoll.collectives.base import Key
from atoll.collectives.grpc.member import RankMember
from atoll.collectives.grpc.server import RankServer
from atoll.collectives.grpc.trust import Member, RankGroup

SECRET = "of a test's own processes, on loopback"
ELEMENTS = 3_000_001  # several chunks of both parts
BULKS = ("grpc", "tcp")
STEPS = 4


def values(rank: int, step: int) -> torch.Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(10 * step + rank))


def group(number: int, *addresses: str) -> RankGroup:
    members = (Member(f"w{k}", address) for k, address in enumerate(addresses))
    return RankGroup(number, tuple(members), SECRET)


def main() -> None:
    torch.set_num_threads(1)
    server = RankServer("127.0.0.1:0")
    print(server.address, flush=True)
    first = sys.stdin.readline().strip()
    for number, bulk in enumerate(BULKS, start=1):
        made = group(number, first, server.address)
        with RankMember(made, 1, server, clock=SystemClock(), bulk=bulk) as ranks:  # type: ignore[arg-type]
            for step in range(1, STEPS + 1):
                own = values(1, step)
                ranks.advance(step)
                ranks.all_reduce(Key(group=number, step=step, op="reduce"), own).wait()
                print(step, float(own.double().sum()), flush=True)
            sys.stdin.readline()  # the other is done, too
    server.close()


if __name__ == "__main__":
    main()
