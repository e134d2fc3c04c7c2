"""What ranks told of their saves while a run went on, against what later groups went back to.

A group that loses a rank goes back to its newest save, because the rank after the lost one holds
that shard, too. That is not seen in the weights a run ends with: going back further trains the same
steps again. So somebody has to watch.
"""

from collections.abc import Sequence
from itertools import pairwise

from atoll.ledger.records import GroupRecord
from atoll.ledger.tables.transaction import Transaction


class Witness:
    """Looks at a run's records from time to time; what it did not see it claims nothing of."""

    def __init__(self) -> None:
        self._told: dict[int, dict[int, set[int]]] = {}  # ranks by step, by group
        self._unclaimed: set[tuple[int, int]] = set()  # group and step
        self._was_away = False

    def look(self, records: Transaction, *, round_steps: int) -> None:
        """Remembers who has told of which step by now, up to the end of the round that is next.

        Nobody may go back beyond it: the round could not be handed in any more.
        """
        newest = records.checkpoints.newest()
        last = (0 if newest is None else newest.step) + round_steps
        saves = [save for save in records.saves.since(0) if save.step <= last]
        if self._was_away:
            # Those who told first learn that a step is consistent when they next tell. While they
            # could not, later saves took its place, so what all told by then is no claim.
            self._unclaimed |= {(save.group_number, save.step) for save in saves}
            self._was_away = False
        for save in saves:
            steps = self._told.setdefault(save.group_number, {})
            steps.setdefault(save.step, set()).add(save.rank)

    def is_away(self) -> None:
        """Nobody can tell anything: the coordinator is away."""
        self._was_away = True

    def check(self, groups: Sequence[GroupRecord]) -> None:
        """AssertionError for a group that went back behind what its members held whole."""
        for before, after in pairwise(groups):
            newest = self._newest(before)
            assert after.step >= newest or not _is_held(before, after), (
                f"group {after.number} went back to step {after.step}; all ranks of group "
                f"{before.number} had told of their saves of step {newest}, and of each one it or "
                f"its successor is in the new group"
            )

    def _newest(self, group: GroupRecord) -> int:
        """The newest step that all ranks of a group have told of."""
        size = len(group.members)
        steps = self._told.get(group.number, {})
        whole = (step for step, ranks in steps.items() if len(ranks) == size)
        return max((s for s in whole if (group.number, s) not in self._unclaimed), default=0)


def _is_held(before: GroupRecord, after: GroupRecord) -> bool:
    """Whether of every rank before, it or the one after it is in the new group."""
    names, here = [m.worker_id for m in before.members], {m.worker_id for m in after.members}
    followers = (*names[1:], names[0])
    return all(not here.isdisjoint(pair) for pair in zip(names, followers, strict=True))
