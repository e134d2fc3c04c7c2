"""Saves that ranks report: recorded, and consistent once all of a group have reported a step."""

from collections.abc import Iterable
from dataclasses import dataclass

from atoll.coordinator.sharded import restoring
from atoll.coordinator.sharded.groups import Groups
from atoll.coordinator.sharded.intervals import Intervals
from atoll.errors import ProtocolError, WrongRound
from atoll.ledger.ledger import Ledger
from atoll.ledger.records import GroupRecord, RankRecord, SaveRecord
from atoll.protocol.sharded import HeldSave, SaveReply, SaveReport


@dataclass(frozen=True)
class Saves:
    """What the present group has saved. Thread-safe: under the lock of the groups."""

    ledger: Ledger
    groups: Groups
    intervals: Intervals

    def report(self, report: SaveReport) -> SaveReply:
        """Records a save; the newest step that all of the group have saved."""
        save = report.save
        with self.groups.lock:
            group, mine = self.groups.member(report.identity, save.group)
            self._check(save, group, mine)
            with self.ledger.writing() as t:
                t.saves.add(
                    SaveRecord(save.group, save.step, mine.rank, save.own, save.predecessor)
                )
                found = self.intervals.reachable(t.saves.since(group.step))
            return SaveReply(consistent=_newest_of(group, found))

    def _check(self, save: HeldSave, group: GroupRecord, mine: RankRecord) -> None:
        if save.rank != mine.rank:
            raise ProtocolError(
                f"rank={save.rank} of the save is not the sender's in group {group.number}, which "
                f"is {mine.rank}; report its own shard"
            )
        every = self.intervals.asked.manifest.sharded.save_every
        planned = [interval.last for interval in self.intervals.intervals()]
        if save.step % every or not max(1, group.step) <= save.step <= max(planned, default=0):
            raise WrongRound(
                f"step={save.step} of the save is none that group {group.number} saves: every "
                f"{every} steps from {group.step} on, up to {max(planned, default=0)}"
            )

    def consistent(self) -> int:
        """The newest step that all of the present group have saved; 0: none."""
        with self.groups.lock:
            group = self.groups.present
            if group is None:
                return 0
            with self.ledger.reading() as t:
                found = self.intervals.reachable(t.saves.since(group.step))
        return _newest_of(group, found)


def _newest_of(group: GroupRecord, saves: Iterable[SaveRecord]) -> int:
    """The newest step of `saves` that is consistent in this group; 0: none is."""
    ours = [one for one in saves if one.group_number == group.number]
    found = restoring.consistent(ours, {group.number: len(group.members)})
    return next((step[0].step for step in found), 0)
