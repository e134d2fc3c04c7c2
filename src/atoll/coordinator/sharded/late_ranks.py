"""What ranks say of those that were late in a round: their rows are in no sum, and open again.

Only ranks know it. So it must be possible, and all ranks of the group must say the same.
"""

from collections.abc import Iterable
from itertools import pairwise

from atoll.errors import Conflict, ProtocolError
from atoll.ledger.records import GroupRecord, PartRecord
from atoll.protocol.sharded import PartReport
from atoll.rows import Late
from atoll.strategies.sharded.strategy import Sharded


def check(report: PartReport, group: GroupRecord, asked: Sharded) -> None:
    """ProtocolError for what cannot have been in the report's round."""
    if report.late and asked.manifest.sharded.commit != "quorum":
        raise ProtocolError(
            f"late={_told(report.late)} in a run with sharded.commit='strict', whose steps wait "
            f"for all ranks; run the same release of atoll on both sides"
        )
    first, last = asked.steps(report.round)
    for step, rank, size in report.late:
        # What an earlier group made of the round it made with as many ranks as it had.
        is_ours = step > group.step
        if not (first <= step <= last and rank < size) or (is_ours and size != len(group.members)):
            raise ProtocolError(
                f"late={(step, rank, size)} is no rank of a step of round {report.round}, steps "
                f"{first} to {last}, in group {group.number} of {len(group.members)}; say step, "
                f"rank and number of ranks"
            )
    if any(before[:2] >= after[:2] for before, after in pairwise(report.late)):
        raise ProtocolError(
            f"late={_told(report.late)} is not in the order of steps and ranks, each once; a row "
            f"is open again once"
        )


def check_same(part: PartRecord, others: Iterable[PartRecord]) -> None:
    """Conflict where another rank of the group says otherwise of the round."""
    for other in others:
        if other.late != part.late:
            raise Conflict(
                f"rank {part.rank} of group {part.group_number} says late={_told(part.late)} of "
                f"round {part.round}, rank {other.rank} says {_told(other.late)}; a step has one "
                f"set of senders, so the first one stands"
            )


def _told(late: tuple[Late, ...]) -> str:
    """The first few."""
    return f"{list(late[:4])}" + (f" and {len(late) - 4} more" if len(late) > 4 else "")
