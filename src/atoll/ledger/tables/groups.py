"""Rank groups and what they save: which steps can be gone back to, and the checkpoints."""

from sqlalchemy import bindparam, delete, func, select

from atoll.errors import Conflict, StoreError
from atoll.ledger.records import CheckpointRecord, GroupRecord, PartRecord, SaveRecord
from atoll.ledger.tables import schema
from atoll.ledger.tables.table import RecordTable

_GROUPS, _SAVES = schema.groups, schema.saves
_PARTS, _CHECKPOINTS = schema.parts, schema.checkpoints
_NEWEST_GROUP = select(_GROUPS).order_by(_GROUPS.c.number.desc()).limit(1)
_UPDATE_GROUP = schema.STATEMENTS[_GROUPS.name].update
_SAVES_FROM = (
    select(_SAVES)
    .where(_SAVES.c.step >= bindparam("first"))
    .order_by(_SAVES.c.step.desc(), _SAVES.c.group_number.desc(), _SAVES.c.rank)
)
_DROP_SAVES = delete(_SAVES).where(_SAVES.c.step < bindparam("below"))
_UNDO_SAVES = delete(_SAVES).where(_SAVES.c.step > bindparam("back_to"))
_PARTS_OF = (
    select(_PARTS)
    .where(_PARTS.c.round == bindparam("of_round"), _PARTS.c.group_number == bindparam("of_group"))
    .order_by(_PARTS.c.rank)
)
_DROP_PARTS = delete(_PARTS).where(_PARTS.c.round <= bindparam("last"))
_TOKENS = select(func.sum(_CHECKPOINTS.c.tokens))
_NEWEST = select(_CHECKPOINTS).order_by(_CHECKPOINTS.c.round.desc()).limit(1)


class GroupTable(RecordTable):
    """Every rank group there ever was."""

    def newest(self) -> GroupRecord | None:
        """The one formed last, over or not."""
        return self._record(GroupRecord, _NEWEST_GROUP)

    def get(self, number: int) -> GroupRecord | None:
        """The one of that number."""
        return self._find(GroupRecord, number)

    def all(self) -> list[GroupRecord]:
        """Oldest first."""
        return self._all(GroupRecord)

    def form(self, group: GroupRecord) -> None:
        """Records a group; StoreError unless its number is new and the one before it is over."""
        before = self.newest()
        if before is not None and (group.number <= before.number or not before.is_over):
            state = "over" if before.is_over else "not over"
            raise StoreError(
                f"group {group.number} cannot follow group {before.number}, which is {state}; "
                f"numbers grow, and one group trains at a time"
            )
        self._add(group)

    def decide(self, number: int, *, round_number: int, goes_on: bool) -> None:
        """What all members of a group are told at the end of a round."""
        told = {"of_number": number, "decided": round_number, "goes_on": goes_on}
        self._connection.change(_UPDATE_GROUP, told)

    def end(self, number: int) -> None:
        """The group is over; harmless when repeated."""
        self._connection.change(_UPDATE_GROUP, {"of_number": number, "is_over": True})


class SaveTable(RecordTable):
    """Which shards of which steps are on which disks."""

    def add(self, save: SaveRecord) -> None:
        """The same report again changes nothing; Conflict for another one of the same rank."""
        held = self._find(SaveRecord, save.group_number, save.step, save.rank)
        if held is None:
            self._add(save)
        elif held != save:
            raise Conflict(
                f"rank {save.rank} of group {save.group_number} saved step {save.step} as "
                f"{held.own!r} and now says {save.own!r}; the first one stands"
            )

    def since(self, step: int) -> list[SaveRecord]:
        """Of this step and later ones: newest step first, then newest group, then by rank."""
        return self._records(SaveRecord, _SAVES_FROM, {"first": step})

    def drop_below(self, step: int) -> None:
        """Forgets saves that nobody goes back to any more."""
        self._connection.change(_DROP_SAVES, {"below": step})

    def went_back_to(self, step: int) -> None:
        """Forgets saves of later steps: they are made again, and those who have them may return."""
        self._connection.change(_UNDO_SAVES, {"back_to": step})


class CheckpointTable(RecordTable):
    """Checkpoints, and the parts of those that are under way."""

    def report(self, part: PartRecord) -> bool:
        """Whether the part is new; again it changes nothing, another of its rank is a Conflict."""
        held = self._find(PartRecord, part.round, part.group_number, part.rank)
        if held is None:
            self._add(part)
            return True
        if (held.part, held.blob) != (part.part, part.blob):
            raise Conflict(
                f"rank {part.rank} of group {part.group_number} has handed in part {held.part!r} "
                f"of round {part.round} and now names {part.part!r}; the first one stands"
            )
        return False

    def parts(self, round_number: int, group_number: int) -> list[PartRecord]:
        """What a group has handed in of a round's checkpoint, by rank."""
        found = {"of_round": round_number, "of_group": group_number}
        return self._records(PartRecord, _PARTS_OF, found)

    def every_part(self) -> list[PartRecord]:
        """Of checkpoints that are not whole yet."""
        return self._all(PartRecord)

    def add(self, checkpoint: CheckpointRecord) -> None:
        """Records a whole checkpoint; parts of it and of earlier rounds are forgotten."""
        self._add(checkpoint)
        self._connection.change(_DROP_PARTS, {"last": checkpoint.round})

    def tokens(self) -> int:
        """Of all checkpoints together."""
        return int(self._connection.value(_TOKENS) or 0)

    def newest(self) -> CheckpointRecord | None:
        """The one of the latest round."""
        return self._record(CheckpointRecord, _NEWEST)

    def get(self, round_number: int) -> CheckpointRecord | None:
        """That of a round."""
        return self._find(CheckpointRecord, round_number)

    def all(self) -> list[CheckpointRecord]:
        """Oldest first."""
        return self._all(CheckpointRecord)
