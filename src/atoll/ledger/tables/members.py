"""Workers, and the generations that freeze who of them is in."""

from dataclasses import dataclass

from sqlalchemy import bindparam, delete, select

from atoll.errors import Fenced, UnknownWorker
from atoll.ledger.records import GenerationRecord, MemberRecord, WorkerRecord
from atoll.ledger.tables import rows, schema
from atoll.ledger.tables.leases import LeaseTable
from atoll.ledger.tables.table import RecordTable

# An earlier generation is only ever refused, for which its number is enough.
KEPT = 64
NONE = GenerationRecord(number=0, created_wall=0.0, members=())

_UPDATE = schema.STATEMENTS[schema.workers.name].update
_GENERATIONS = schema.generations
_NEWEST = select(_GENERATIONS).order_by(_GENERATIONS.c.number.desc()).limit(1)
_DROP = delete(_GENERATIONS).where(_GENERATIONS.c.number <= bindparam("last_dropped"))


@dataclass
class MemberTable(RecordTable):
    """Every worker that ever registered, and the newest generations."""

    _leases: LeaseTable

    def workers(self) -> list[WorkerRecord]:
        """In worker_id order."""
        return self._all(WorkerRecord)

    def generation(self) -> GenerationRecord:
        """The newest generation: the active workers by rank. Numbers only grow."""
        return self._record(GenerationRecord, _NEWEST) or NONE

    def register(
        self,
        worker_id: str,
        key_sha256: str,
        *,
        wall: float,
        ip_address: str = "",
        port: int = 0,
        certificate: str = "",
    ) -> WorkerRecord:
        """A new incarnation of `worker_id` (1 for a new one), active, with this key.

        With it a new generation, in which it is reached at this address; its leases that are
        still to be used go over to this life, with the next lease epoch.
        """
        known = self._find(WorkerRecord, worker_id)
        life = 1 if known is None else known.incarnation + 1
        record = WorkerRecord(worker_id, key_sha256, life, active=True, registered_wall=wall)
        if known is None:
            self._add(record)
        else:
            # Without its key: SQLite would look for it in every lease and contribution.
            changed = {name: v for name, v in rows.values(record).items() if name != "worker_id"}
            self._connection.change(_UPDATE, {"of_worker_id": worker_id, **changed})
        self._leases.hand_over(worker_id, life)
        self._renew(wall=wall, placed={worker_id: (ip_address, port, certificate)})
        return record

    def deregister(self, worker_id: str, incarnation: int, *, wall: float) -> None:
        """Marks the worker inactive, with a new generation without it.

        UnknownWorker; Fenced when a later incarnation exists.
        """
        self.check_incarnation(worker_id, incarnation)
        self._connection.change(_UPDATE, {"of_worker_id": worker_id, "active": False})
        self._renew(wall=wall, placed={})

    def check_known(self, worker_id: str) -> WorkerRecord:
        """The worker of that name, or UnknownWorker."""
        known = self._find(WorkerRecord, worker_id)
        if known is None:
            unknown = f"no worker_id={worker_id!r} is registered in this run"
            raise UnknownWorker(f"{unknown}; register first")
        return known

    def check_incarnation(self, worker_id: str, incarnation: int) -> None:
        """UnknownWorker, or Fenced unless `incarnation` is the worker's latest."""
        latest = self.check_known(worker_id).incarnation
        if incarnation != latest:
            lives = f"is at incarnation {latest}, this message is from {incarnation}"
            rule = "only the latest may act, so this process must stop"
            raise Fenced(f"worker_id={worker_id!r} {lives}; {rule}")

    def _renew(self, *, wall: float, placed: dict[str, tuple[str, int, str]]) -> None:
        """Freezes the workers that are active now, unless nobody changed.

        `placed` says how those that just registered are reached; others keep what they said.
        """
        before = self.generation()
        places = {m.worker_id: (m.ip_address, m.port, m.certificate) for m in before.members}
        places |= placed
        active = [worker for worker in self.workers() if worker.active]
        found = tuple(
            MemberRecord(rank, w.worker_id, w.incarnation, *places.get(w.worker_id, ("", 0, "")))
            for rank, w in enumerate(active)
        )
        if found != before.members:
            made = GenerationRecord(before.number + 1, wall, found)
            self._add(made)
            self._connection.change(_DROP, {"last_dropped": made.number - KEPT})
