"""Whether a loop's rows would show a wrong count: ranks must hold different ones at some size.

With equal counts the mean of the ranks' means is the mean of all, so the commonest bug is right.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from atoll.pools.gradcheck.loop_reference import LoopReference
from atoll.pools.loop import rows_of

WAY_OUT = "give rows of different length, or another number of rows or ranks"


@dataclass(frozen=True, slots=True)
class Evenness:
    """What is to be said of the counts: `no_verdicts` take the verdict away, remarks do not."""

    no_verdicts: tuple[str, ...]
    remarks: tuple[str, ...]


def judged(reference: LoopReference, sizes: Sequence[int]) -> Evenness:
    """Of the counts that ranks hold at these sizes."""
    rows = reference.loop.num_rows
    held = [
        reference.counts([rows_of(rank, ranks=ranks, rows=rows) for rank in range(ranks)])
        for ranks in sizes
    ]
    even = [name for name in reference.parts.terms if all(len(set(at[name])) == 1 for at in held)]
    if not even:
        return Evenness((), ())
    # One by one only where it matters: a term may need several rows.
    by_row = reference.counts([torch.tensor([row]) for row in range(rows)])
    hidden = [name for name in even if len(set(by_row[name])) > 1]
    alike = [name for name in even if name not in hidden]
    no_verdicts = []
    if hidden:
        no_verdicts.append(
            f"no verdict on counts: rows of {hidden} differ in count, but every rank has the same "
            f"count at every size; {WAY_OUT}"
        )
    if len(even) == len(reference.parts.terms) and not hidden:
        no_verdicts.append(
            f"no verdict on counts: every rank has the same count of {alike}, of every term there "
            f"is; {WAY_OUT}"
        )
        alike = []
    remark = f"no verdict on counts: every rank has the same count of {alike}"
    return Evenness(tuple(no_verdicts), (remark,) if alike else ())
