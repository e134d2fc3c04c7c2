"""What a gather costs, first part: consumers. Overlap, update and memory of one rank on one core.

    overlap   256 chunks of 20 peers, counted, against comparing all pairs in numpy; places are
              there on both sides, because the update needs them, too
    speed     20 payloads of 25 M parameters: exchange, compare, clip, vote, apply and digest
    memory    peak above libraries, compiled loops and own tiles, at budgets of 64 and 256 MB

The best of several passes counts for the overlap: other work on the machine only adds.

    python -m benchmarks.gather [--json] [--passes 5] [--peers 4 16 64]
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import combinations
from typing import Any

import numpy as np
import torch

from atoll.codecs.topk.chunks import CHUNK, ROW
from atoll.codecs.topk.codec import TopK
from atoll.gather import supports
from atoll.gather.overlap import PairCounts
from atoll.gather.supports import Supports
from atoll.layout import Span
from benchmarks.gather_memory import Window, measured, warm
from benchmarks.report import Bar, report, show

CHUNKS, PEERS = 256, 20
PAYLOAD_MB = {"speed": 0.5005, "memory": 2.5}  # 25 M and 125 M parameters
BUDGETS_MB = (64, 256)
OVERLAP_AIM, SECONDS_AIM, MB_PER_PEER_AIM = 30.0, 2.4, 0.25
# Freed memory goes back at once, so that the highest mark is what was held.
HELD_ALONE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


def best_seconds(work: Callable[[], object], *, passes: int) -> float:
    """Of one core."""
    taken = []
    for _ in range(passes):
        begun = time.process_time()
        work()
        taken.append(time.process_time() - begun)
    return min(taken)


def all_pairs(sent: Supports) -> "np.typing.NDArray[np.int64]":
    """Templar's way: every place of one peer with every place of another, chunk by chunk."""
    places = sent.indices.reshape(sent.peers, -1, CHUNK // ROW)  # [peers, chunks, k]
    table = np.zeros((sent.peers, sent.peers), np.int64)
    for one, other in combinations(range(sent.peers), 2):
        same = places[one][:, :, None] == places[other][:, None, :]  # [chunks, k, k]
        table[one, other] = np.count_nonzero(same.any(axis=2))
    return table


def overlap(*, passes: int) -> dict[str, float]:
    span, rng = Span(0, CHUNKS * CHUNK), np.random.default_rng(0)
    drawn = (rng.standard_normal(len(span), np.float32) for _ in range(PEERS))
    slices = np.stack(
        [TopK().encode(torch.from_numpy(one), noise=None, first_group=0).numpy() for one in drawn]
    )
    counts = PairCounts(PEERS)

    def ours() -> None:
        counts.table.zero_()
        counts.add(sent)

    sent = supports.decode(slices, span)
    decoding = best_seconds(lambda: supports.decode(slices, span), passes=passes)
    theirs = best_seconds(lambda: all_pairs(sent), passes=passes)
    mine = best_seconds(ours, passes=passes)
    assert np.array_equal(counts.shared, all_pairs(sent))
    return {
        "all_pairs_seconds": theirs,
        "seconds": mine,
        "times": theirs / mine,
        "decode_seconds": decoding,  # on both sides, and once for overlap and update together
        "times_with_decoding": (theirs + decoding) / (mine + decoding),
    }


def memory(peers: Sequence[int]) -> list[dict[str, Any]]:
    windows = [
        Window(peers=count, budget_mb=budget, megabytes=PAYLOAD_MB["memory"])
        for budget in BUDGETS_MB
        for count in peers
    ]
    found = []
    for window in windows:  # each in a process of its own
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.gather_memory", json.dumps([asdict(window)])],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **HELD_ALONE},
        )
        [one] = json.loads(done.stdout)
        found.append({**asdict(window), **one})
    return found


def bars(results: dict[str, Any]) -> list[Bar]:
    made = [
        Bar("overlap: times the all-pairs way", results["overlap"]["times"], OVERLAP_AIM, True),
        Bar("20 peers x 25 M: s of one core", results["speed"]["processor_seconds"], SECONDS_AIM),
    ]
    by = {(one["budget_mb"], one["peers"]): one["peak_mb"] for one in results["memory"]}
    for (budget, peers), peak in by.items():
        made.append(Bar(f"{peers} peers, budget {budget}: peak MB", peak, budget))
    for budget in BUDGETS_MB:
        if (budget, 16) in by and (budget, 64) in by:
            grown = (by[budget, 64] - by[budget, 16]) / 48
            made.append(Bar(f"budget {budget}: MB per peer, 16 to 64", grown, MB_PER_PEER_AIM))
    return made


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--peers", type=int, nargs="*", default=[4, 16, 64])
    args = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    warm()
    results = {
        "overlap": overlap(passes=args.passes),
        "speed": measured(Window(peers=PEERS, budget_mb=64, megabytes=PAYLOAD_MB["speed"])),
        "memory": memory(args.peers),
    }
    show(report(results, bars(results)), as_json=args.json)


if __name__ == "__main__":
    main()
