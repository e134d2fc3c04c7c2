"""A step of our sharded engine against FSDP2 on gloo: seconds, processor time, bytes and losses.

Two ranks are processes, on one thread each, with one row of a 25 M GPT each, so that communication
is over half of a step. All variants train the same rows in turns: they meet the same machine. On
loopback seconds and losses; between two network namespaces of 100 Mbit/s (needs root) seconds and
the bytes that the device sent. `waiting` is the part of a step that ours waits for others; also at
4 ranks. A ratio is ours divided by FSDP2's, the better of its two ways. The most that a rank's
tensors hold, activations apart, is counted at 2, 3 and 4 ranks in one process. What 1-bit Adam does
to losses and gradients' bytes is measured by `sharded_onebit`.

    python -m benchmarks.sharded [--json] [--repeats 7] [--without-slow-link]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from atoll.clock import SystemClock
from atoll.collectives.local import LocalGroup
from atoll.collectives.runners import Threaded
from atoll.models import gpt, registry
from atoll.strategies.sharded.adamw import AdamW
from atoll.strategies.sharded.engine import Engine
from atoll.strategies.sharded.hooks import Call
from atoll.strategies.sharded.shard import Shard
from atoll.strategies.sharded.step import Step
from atoll.strategies.sharded.units import Units
from benchmarks import sharded_onebit
from benchmarks.report import Bar, report, show
from benchmarks.sharded_rank import VARIANTS, WARM_UP, is_offered
from benchmarks.slow_link import slow_link

MODEL: dict[str, Any] = {
    "architecture": "gpt",
    **{"vocab": 6_144, "block": 64, "layers": 6, "heads": 8, "width": 512},
}
FSDP2 = ("fsdp2", "fsdp2, gathers ahead")
MEGABITS = 100
SLOW_REPEATS = 1
LIMIT_SECONDS = 1_500
Found = dict[str, list[dict[str, float]]]


def run(
    variants: Sequence[str],
    *,
    size: int = 2,
    repeats: int,
    addresses: Sequence[str] | None = None,
    device: str = "lo",
    programs: Sequence[Sequence[str]] | None = None,
) -> Found:
    """What rank 0 measured of each variant's steps, the first ones left out."""
    plan = {
        "model": MODEL,
        "variants": list(variants),
        "repeats": repeats,
        "addresses": list(addresses or ["127.0.0.1"] * size),
        "device": device,
    }
    with tempfile.TemporaryDirectory(prefix="atoll-sharded-") as home:
        ranks = [
            subprocess.Popen(
                [
                    *(programs[rank] if programs else ()),
                    *(sys.executable, "-m", "benchmarks.sharded_rank"),
                    *(home, str(rank), str(size), json.dumps(plan)),
                ]
            )
            for rank in range(size)
        ]
        try:
            codes = [rank.wait(timeout=LIMIT_SECONDS) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}; what they printed says why")
        found: Found = json.loads((Path(home) / "found.json").read_text())
    return {name: steps[WARM_UP:] for name, steps in found.items()}


def on_slow_link(variants: Sequence[str]) -> Found:
    """The same between two namespaces, whose device counts bytes."""
    with slow_link(megabits=MEGABITS) as sides:
        return run(
            variants,
            repeats=SLOW_REPEATS,
            addresses=[side.address for side in sides],
            device="slow0",
            programs=[side.program for side in sides],
        )


class Counted(Engine):
    """Knows the most that it held at once, beside its shard."""

    most = 0

    def before_forward(self, unit: int) -> Call | None:
        call = super().before_forward(unit)
        self.most = max(self.most, self.nbytes)
        return call

    def before_backward(self, call: Call) -> None:
        super().before_backward(call)
        self.most = max(self.most, self.nbytes)

    def after_backward(self, call: Call) -> None:
        self.most = max(self.most, self.nbytes)
        super().after_backward(call)
        self.most = max(self.most, self.nbytes)


def most_bytes(size: int) -> dict[str, float]:
    """Of the rank that holds most in one step, and the issue's bound."""
    units = Units.of_model(registry.layout(MODEL))
    group = LocalGroup(size, clock=SystemClock())
    rows = torch.zeros(1, MODEL["block"] + 1, dtype=torch.int64)

    def work(rank: int) -> int:
        runner = Threaded(f"rank-{rank}")
        shard = Shard(units, rank=rank, size=size)
        model, ranks = registry.hollow(MODEL), group.rank(rank, runner)
        engine = Counted(model, shard, ranks, group=1, clock=SystemClock())
        Step(engine, AdamW(), clip=1.0).train(1, [(rows, MODEL["block"])], gpt.loss, lr=1e-3)
        runner.close()
        return shard.nbytes + engine.most

    with ThreadPoolExecutor(size) as pool:
        found = max(pool.map(work, range(size)))
    bound = 1.1 * 16 * units.layout.size / size + 4 * 4 * units.largest
    return {"bytes": found, "bound": bound}


def summary(found: Found) -> dict[str, dict[str, float]]:
    """Medians of each variant."""
    return {
        name: {key: statistics.median(step[key] for step in steps) for key in steps[0]}
        for name, steps in found.items()
    }


def bars(
    quick: dict[str, dict[str, float]],
    slow: dict[str, dict[str, float]],
    held: dict[str, dict[str, float]],
) -> list[Bar]:
    """The issue's aims."""
    best = min(quick[name]["seconds"] for name in FSDP2)
    made = [
        Bar(f"{name}: step, of FSDP2's", quick[name]["seconds"] / best, aim)
        for name, aim in (("grpc", 1.1), ("tcp", 0.9))
        if name in quick
    ]
    made += [
        Bar(f"tensor bytes, {name}, of the bound", found["bytes"] / found["bound"], 1.0)
        for name, found in held.items()
    ]
    if slow:
        made += [
            Bar(
                f"grpc int8: step at {MEGABITS} Mbit/s, of FSDP2's",
                slow["grpc int8"]["seconds"] / slow["fsdp2"]["seconds"],
                1.0,
            ),
            Bar(
                "int8: socket bytes, of fp32's",
                slow["grpc int8"]["bytes"] / slow["grpc"]["bytes"],
                0.27,
            ),
            Bar(
                "int8, bf16 parameters: socket bytes, of fp32's",
                slow["grpc int8, bf16 parameters"]["bytes"] / slow["grpc"]["bytes"],
                0.42,
            ),
        ]
    return made


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--json", action="store_true")
    arguments.add_argument("--repeats", type=int, default=7)
    arguments.add_argument("--without-slow-link", action="store_true")
    given = arguments.parse_args()
    names = [name for name, variant in VARIANTS.items() if is_offered(variant)]
    skipped = {
        name: "the transports here do not offer it" for name in VARIANTS if name not in names
    }
    quick = summary(run([*FSDP2, *names], repeats=given.repeats))
    four = summary(run(["grpc"], size=4, repeats=max(1, given.repeats // 2)))
    slow: dict[str, dict[str, float]] = {}
    if not given.without_slow_link:
        slow = summary(
            on_slow_link(["fsdp2", "grpc", "grpc int8", "grpc int8, bf16 parameters", "grpc 1-bit"])
        )
    torch.set_num_threads(1)
    held = {f"{size} ranks": most_bytes(size) for size in (2, 3, 4)}
    onebit = sharded_onebit.measured()
    results = {
        "tensor bytes": held,
        "onebit": onebit,
        "model": MODEL,
        "loopback, 2 ranks": quick,
        "loopback, 4 ranks": four,
        f"{MEGABITS} Mbit/s, 2 ranks": slow,
        "skipped": skipped,
    }
    aims = [*bars(quick, slow, held), *sharded_onebit.bars(onebit)]
    show(report(results, aims), as_json=given.json)


if __name__ == "__main__":
    main()
