"""What was lost of error feedback: residuals that no later contribution of their island took in.

An island's contribution states the norm of the residual that it leaves, and the round of the one
whose residual it has taken in. From these records alone follows who went for good with a residual,
and who returned without it. Nothing here is a fault: islands may die. Pure functions of records.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import attrgetter

from atoll.ledger.records import ContributionRecord, WorkerRecord


@dataclass(frozen=True)
class LostResidual:
    """What one island held back, and took along or came back without."""

    worker_id: str
    round: int  # of the contribution that left it
    norm: float
    next: int | None  # the island's next contribution, which lacks it; None: the island is gone
    carried: int = 0  # the round whose residual that one has instead; 0: none


def lost(
    contributions: Iterable[ContributionRecord], workers: Iterable[WorkerRecord]
) -> list[LostResidual]:
    """By worker_id, then by round. A worker that is still a member may bring its own yet."""
    members = {worker.worker_id for worker in workers if worker.active}
    found = []
    in_order = sorted(contributions, key=attrgetter("worker_id", "round"))
    for worker_id, group in groupby(in_order, key=attrgetter("worker_id")):
        made = list(group)
        for left, later in pairwise(made):
            # A later one than is recorded may be in it, of a history that was repaired away; that
            # one had taken in what was left here.
            if left.residual and later.carried < left.round:
                found.append(_lost(left, next_round=later.round, carried=later.carried))
        if made[-1].residual and worker_id not in members:
            found.append(_lost(made[-1]))
    return found


def _lost(
    left: ContributionRecord, *, next_round: int | None = None, carried: int = 0
) -> LostResidual:
    return LostResidual(left.worker_id, left.round, left.residual, next_round, carried)
