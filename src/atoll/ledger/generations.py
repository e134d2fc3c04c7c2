"""Statements that freeze the membership: a new generation with every change of who is in.

Called inside the transaction that changes a worker, so that the two are never seen apart.
"""

from collections.abc import Mapping

from sqlalchemy import Connection, bindparam, delete, insert, select

from atoll.ledger import members, rows, schema
from atoll.ledger.records import GenerationRecord, MemberRecord

# An earlier generation is only ever refused, for which its number is enough.
KEPT = 64
NONE = GenerationRecord(number=0, created_wall=0.0, members=())

_TABLE = schema.generations
_NEWEST = select(_TABLE).order_by(_TABLE.c.number.desc()).limit(1)
_INSERT = insert(_TABLE)
_DROP = delete(_TABLE).where(_TABLE.c.number <= bindparam("last_dropped"))


def newest(connection: Connection) -> GenerationRecord:
    """See `Ledger.generation`."""
    row = connection.execute(_NEWEST).one_or_none()
    return NONE if row is None else rows.generation(row)


def renew(
    connection: Connection, *, wall: float, placed: Mapping[str, tuple[str, int]]
) -> GenerationRecord:
    """The generation of the workers that are active now; the same one when nobody changed.

    `placed` gives the address and port of those that just registered; others keep theirs.
    """
    before = newest(connection)
    places = {m.worker_id: (m.ip_address, m.port) for m in before.members} | dict(placed)
    active = [worker for worker in members.workers(connection) if worker.active]
    found = tuple(
        MemberRecord(
            rank, worker.worker_id, worker.incarnation, *places.get(worker.worker_id, ("", 0))
        )
        for rank, worker in enumerate(active)
    )
    if found == before.members:
        return before
    made = GenerationRecord(before.number + 1, wall, found)
    connection.execute(_INSERT, rows.generation_values(made))
    connection.execute(_DROP, {"last_dropped": made.number - KEPT})
    return made
