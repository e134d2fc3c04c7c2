"""One rank of `benchmarks.sharded`: FSDP2 and our engine in turns, on one model and the same rows.

    python -m benchmarks.sharded_rank HOME RANK SIZE PLAN     (started by benchmarks.sharded)

PLAN is JSON: address, device, variants, repeats, model. Rank 0 writes what it measured to HOME.
"""

import inspect
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from atoll.clock import SystemClock
from atoll.collectives import codecs
from atoll.collectives.grpc.member import RankMember
from atoll.collectives.grpc.server import RankServer
from atoll.collectives.grpc.trust import Member, RankGroup
from atoll.compiled.base import compiled
from atoll.models import gpt, init, registry
from atoll.strategies.sharded.adamw import AdamW
from atoll.strategies.sharded.engine import Engine
from atoll.strategies.sharded.shard import Shard
from atoll.strategies.sharded.step import Step
from atoll.strategies.sharded.units import Units

WARM_UP = 2
SECRET = "of the benchmark's own processes, inside this machine"
RULE = AdamW()
LR = 1e-3
# A variant: what carries it, how it is exchanged, and how gradients and parameters travel.
VARIANTS: dict[str, dict[str, str]] = {
    "grpc": {},
    "grpc int8": {"way": "direct", "gradients": "int8", "parameters": "int8"},
    "grpc int8, bf16 parameters": {
        "way": "direct",
        "gradients": "int8",
        "parameters": "bf16",
    },
    "grpc 1-bit": {"way": "direct", "onebit": "2"},
    "tcp": {"bulk": "tcp"},
    "tcp int8": {"bulk": "tcp", "way": "direct", "gradients": "int8", "parameters": "int8"},
}
Train = Callable[[int], dict[str, float]]  # a step by its number -> loss and what else is known


def rows_of(definition: dict[str, Any], step: int, rank: int) -> Tensor:
    """One row for each rank."""
    generator = torch.Generator().manual_seed(step * 1_000 + rank)
    shape = (1, definition["block"] + 1)
    return torch.randint(0, definition["vocab"], shape, generator=generator)


def fsdp2(definition: dict[str, Any], rank: int, *, overlaps: bool) -> Train:
    """torch's own, on gloo; `overlaps` is its option to gather ahead."""
    model = registry.build(definition)
    with torch.no_grad():
        for name, values in init.initial_weights(registry.layout_of(model), seed=1):
            model.get_parameter(name).copy_(values)
    for block in model.get_submodule("blocks").children():
        fully_shard(block)
    made: Any = fully_shard(model)
    if overlaps:
        made._set_unshard_async_op(True)  # noqa: SLF001  # torch offers it under this name alone
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    decays = [(matrices, RULE.weight_decay), (vectors, 0.0)]
    optimizer = torch.optim.AdamW(
        [{"params": some, "weight_decay": decay} for some, decay in decays],
        lr=LR,
        betas=(RULE.beta1, RULE.beta2),
    )

    def train(step: int) -> dict[str, float]:
        loss = gpt.loss(model, rows_of(definition, step, rank))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return {"loss": total.item() / dist.get_world_size()}

    return train


def ours(
    stack: ExitStack,
    definition: dict[str, Any],
    home: Path,
    place: tuple[int, int, str],
    variant: dict[str, str],
) -> Train:
    """Our engine between servers of their own."""
    rank, size, _ = place
    member = _member(stack, home, place, variant)
    units = Units.of_model(registry.layout(definition))
    shard = Shard(units, rank=rank, size=size)
    offsets = {t.name: t.offset for t in units.layout.tensors}
    for name, values in init.initial_weights(units.layout, seed=1):
        shard.fill("weights", offsets[name], values.reshape(-1))
    engine = Engine(
        registry.hollow(definition),
        shard,
        member,
        group=1,
        clock=SystemClock(),
        parameter_codec=codecs.of_parameters(variant.get("parameters", "fp32")),
        gradient_codec=codecs.of_gradients(variant.get("gradients", "fp32"), seed=1),
    )
    warmup = int(variant.get("onebit", "0"))
    steps = Step(engine, RULE, clip=1.0, onebit_warmup_steps=warmup)
    tokens = definition["block"]

    def train(step: int) -> dict[str, float]:
        rows = rows_of(definition, step, rank)
        made = steps.train(step + 1, [(rows, tokens)], gpt.loss, lr=LR)
        parts = made.seconds
        waiting = parts.gather + parts.reduce
        return {"loss": made.loss_sum / made.tokens, "waiting": waiting / parts.total}

    return train


def _member(
    stack: ExitStack, home: Path, place: tuple[int, int, str], variant: dict[str, str]
) -> RankMember:
    rank, size, address = place
    server = RankServer(f"{address}:0")
    stack.callback(server.close)
    (home / f"rank-{rank}.json").write_text(json.dumps(server.address))
    dist.barrier()
    told = [json.loads((home / f"rank-{k}.json").read_text()) for k in range(size)]
    dist.barrier()  # before the next variant writes its own
    group = RankGroup(1, tuple(Member(f"w{k}", at, b"") for k, at in enumerate(told)), SECRET)
    carried: dict[str, Any] = {"bulk": variant["bulk"]} if "bulk" in variant else {}
    return stack.enter_context(
        RankMember(
            group,
            rank,
            server,
            clock=SystemClock(),
            way="direct" if variant.get("way") == "direct" else "ring",
            timeout_seconds=300.0,
            **carried,
        )
    )


def is_offered(variant: dict[str, str]) -> bool:
    """Whether the transports here carry it."""
    return "bulk" not in variant or "bulk" in inspect.signature(RankMember).parameters


def _sent_bytes(device: str) -> int:
    return int(Path(f"/sys/class/net/{device}/statistics/tx_bytes").read_text())


def _measured(train: Train, step: int, device: str) -> dict[str, float]:
    dist.barrier()
    used, sent, began = _used(), _sent_bytes(device), time.perf_counter()
    told = train(step)
    seconds, cpu = time.perf_counter() - began, _used() - used
    dist.barrier()
    return {**told, "seconds": seconds, "cpu": cpu, "bytes": _sent_bytes(device) - sent}


def _used() -> float:
    found = resource.getrusage(resource.RUSAGE_SELF)
    return found.ru_utime + found.ru_stime


def main() -> None:
    home, rank, size, plan = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    told = json.loads(plan)
    definition = told["model"]
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = told["device"]
    dist.init_process_group("gloo", init_method=f"file://{home}/gloo", rank=rank, world_size=size)
    place = rank, size, told["addresses"][rank]
    with ExitStack() as stack:
        trains: dict[str, Train] = {}
        for name in told["variants"]:
            if name.startswith("fsdp2"):
                trains[name] = fsdp2(definition, rank, overlaps=name.endswith("ahead"))
            else:
                trains[name] = ours(stack, definition, home, place, VARIANTS[name])
        compiled.wait()
        found: dict[str, list[dict[str, float]]] = {name: [] for name in trains}
        for step in range(WARM_UP + told["repeats"]):
            for name, train in trains.items():
                found[name].append(_measured(train, step, told["device"]))
        if rank == 0:
            (home / "found.json").write_text(json.dumps(found))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
