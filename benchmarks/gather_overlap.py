"""Which places peers share, counted by bitmaps, against the all-pairs way of templar.

That way, as its validator has it: unpack every peer's places from 12 bits to int64, then compare
for each pair every place of one with every place of the other, chunk by chunk, in torch. Ours
begins with the bytes of the payloads, too. Both have one thread, and their tables are compared.
"""

import time
from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.codecs.topk.chunks import CHUNK, ROW
from atoll.codecs.topk.codec import TopK
from atoll.compiled.base import LARGE_ELEMENTS, compiled
from atoll.gather import supports
from atoll.gather.overlap import PairCounts
from atoll.gather.supports import Supports
from atoll.layout import Span
from benchmarks.report import Bar

CHUNKS, PEERS, PASSES = 256, 20, 5
KEPT = CHUNK // ROW
AIM = 30.0


def best_seconds(work: Callable[[], object]) -> float:
    """Of one core, the best of several passes: other work on the machine only adds."""
    taken = []
    for _ in range(PASSES):
        begun = time.process_time()
        work()
        taken.append(time.process_time() - begun)
    return min(taken)


def packed(places: Tensor) -> Tensor:
    """Places of a peer in 12 bits each, two in three bytes."""
    first, second = places.reshape(-1, 2).unbind(1)
    three = (first & 255, first >> 8 | (second & 15) << 4, second >> 4)
    return torch.stack(three, 1).to(torch.uint8).reshape(-1)


def unpacked(data: Tensor) -> Tensor:
    """int64 [chunks, kept]."""
    low, middle, high = data.reshape(-1, 3).to(torch.int64).unbind(1)
    pairs = torch.stack((low | (middle & 15) << 8, middle >> 4 | high << 4), 1)
    return pairs.reshape(-1, KEPT)


def all_pairs(places: Tensor) -> Tensor:
    """Templar's comparison: [peers, peers] from [peers, chunks, kept]."""
    table = torch.zeros(len(places), len(places), dtype=torch.int64)
    for one, other in combinations(range(len(places)), 2):
        same = places[one].unsqueeze(-1) == places[other].unsqueeze(-2)  # [chunks, kept, kept]
        table[one, other] = same.any(-1).sum(-1).sum()
    return table


def all_pairs_in_numpy(sent: Supports) -> "np.typing.NDArray[np.int64]":
    """The same on int32 in numpy: as quick as that way gets."""
    places = sent.indices.reshape(sent.peers, -1, KEPT)
    table = np.zeros((sent.peers, sent.peers), np.int64)
    for one, other in combinations(range(sent.peers), 2):
        same = places[one][:, :, None] == places[other][:, None, :]
        table[one, other] = np.count_nonzero(same.any(axis=2))
    return table


def measured() -> tuple[dict[str, Any], list[Bar]]:
    torch.set_num_threads(1)
    compiled.prepare(LARGE_ELEMENTS)
    compiled.wait()
    span, rng = Span(0, CHUNKS * CHUNK), np.random.default_rng(0)
    drawn = (rng.standard_normal(len(span), np.float32) for _ in range(PEERS))
    slices = np.stack(
        [TopK().encode(torch.from_numpy(one), noise=None, first_group=0).numpy() for one in drawn]
    )
    counts, sent = PairCounts(PEERS), supports.decode(slices, span)
    chunks = torch.from_numpy(sent.indices).reshape(PEERS, CHUNKS, KEPT) % CHUNK
    theirs = [packed(one) for one in chunks]
    places = torch.stack([unpacked(one) for one in theirs])

    def ours() -> None:
        counts.table.zero_()
        counts.add(sent)

    found = {
        "unpack_seconds": best_seconds(lambda: torch.stack([unpacked(one) for one in theirs])),
        "all_pairs_seconds": best_seconds(lambda: all_pairs(places)),
        "all_pairs_in_numpy_seconds": best_seconds(lambda: all_pairs_in_numpy(sent)),
        "decode_seconds": best_seconds(lambda: supports.decode(slices, span)),
        "count_seconds": best_seconds(ours),
    }
    assert np.array_equal(counts.shared, all_pairs(places).numpy())
    assert np.array_equal(counts.shared, all_pairs_in_numpy(sent))
    theirs_seconds = found["unpack_seconds"] + found["all_pairs_seconds"]
    ours_seconds = found["decode_seconds"] + found["count_seconds"]
    quickest = found["all_pairs_in_numpy_seconds"]
    found |= {
        "times": theirs_seconds / ours_seconds,  # from payloads to tables
        "times_counting_alone": found["all_pairs_seconds"] / found["count_seconds"],
        "times_numpy_counting_alone": quickest / found["count_seconds"],
        "times_numpy": (quickest + found["decode_seconds"]) / ours_seconds,
        "chunks": CHUNKS,
        "peers": PEERS,
    }
    return found, [Bar("overlap: times the all-pairs way", found["times"], AIM, True)]
