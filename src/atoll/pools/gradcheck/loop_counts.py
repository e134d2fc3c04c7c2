"""Whether a loop's rows would show a wrong count: ranks must hold different ones at some size."""

from collections.abc import Sequence

import torch

from atoll.pools.gradcheck.evenness import Evenness, evenness
from atoll.pools.gradcheck.loop_reference import LoopReference
from atoll.pools.loop import rows_of


def judged(reference: LoopReference, sizes: Sequence[int]) -> Evenness:
    """Of the counts that ranks hold at these sizes."""
    rows = reference.loop.num_rows
    held = [
        reference.counts([rows_of(rank, ranks=ranks, rows=rows) for rank in range(ranks)])
        for ranks in sizes
    ]
    # One by one only where it matters: a term may need several rows.
    even = [name for name in reference.parts.terms if all(len(set(at[name])) == 1 for at in held)]
    by_row = reference.counts([torch.tensor([row]) for row in range(rows)]) if even else {}
    return evenness({name: [at[name] for at in held] for name in reference.parts.terms}, by_row)
