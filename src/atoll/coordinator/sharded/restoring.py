"""What a new group goes back to: pure, from what was saved and who holds it.

The newest consistent step of which the new members hold every shard, own or predecessor's, by its
recorded hash, if it is not older than the newest checkpoint; else that; else the initial weights.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter

from atoll.ledger.records import SaveRecord
from atoll.protocol.sharded import HeldSave, Restore

Holders = tuple[tuple[int, ...], ...]


def consistent(
    saves: Iterable[SaveRecord], sizes: Mapping[int, int]
) -> Iterator[Sequence[SaveRecord]]:
    """The saves that all ranks of a group reported and agree on, by rank; in the given order.

    `saves` come step by step and group by group, each by rank, as the ledger gives them; `sizes`
    tells how many ranks a group has.
    """
    for (_, number), found in groupby(saves, key=attrgetter("step", "group_number")):
        ranks = list(found)
        size = sizes.get(number, 0)
        if [save.rank for save in ranks] != list(range(size)):
            continue
        if all(ranks[save.rank - 1].own == save.predecessor for save in ranks):
            yield ranks


def holders(saves: Sequence[SaveRecord], held: Sequence[Sequence[HeldSave]]) -> Holders:
    """For each shard of a consistent step, the new ranks that have it; `held` is by new rank."""
    size = len(saves)

    def has(one: HeldSave, save: SaveRecord) -> bool:
        if (one.step, one.group) != (save.step, save.group_number):
            return False
        own = one.rank == save.rank and one.own == save.own
        return own or ((one.rank - 1) % size == save.rank and one.predecessor == save.own)

    return tuple(
        tuple(rank for rank, mine in enumerate(held) if any(has(one, save) for one in mine))
        for save in saves
    )


def from_disks(
    candidates: Iterable[Sequence[SaveRecord]], held: Sequence[Sequence[HeldSave]]
) -> Restore | None:
    """The first of `candidates`, newest first, of which every shard is held; None: there is none.

    Without its tokens.
    """
    for saves in candidates:
        found = holders(saves, held)
        if all(found):
            return Restore(
                source="save",
                step=saves[0].step,
                group=saves[0].group_number,
                size=len(saves),
                parts=tuple(save.own for save in saves),
                holders=found,
            )
    return None
