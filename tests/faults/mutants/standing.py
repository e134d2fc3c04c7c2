"""Mutants of who may speak: fencing, generations, eviction, the operator's word."""

from dataclasses import replace
from typing import Any

from atoll.coordinator.members import liveness
from atoll.coordinator.members.control import Control
from atoll.coordinator.members.heartbeats import Heartbeats
from atoll.coordinator.members.membership import Membership
from atoll.coordinator.members.presence import Presence
from atoll.coordinator.members.workers import Registry
from atoll.coordinator.rounds.assignments import Assignments
from atoll.errors import Evicted, UnknownWorker, WorkerTaken
from atoll.ledger.records import WorkerRecord
from atoll.ledger.tables.members import MemberTable
from atoll.ledger.tables.run import NamedValues
from atoll.protocol.messages import Identity
from tests.faults.mutants.mutant import (
    Mutant,
    Patch,
    adding_to,
    answering,
    crowded,
    during,
    having,
    never_paused,
)

MUTANTS: list[Mutant] = []
mutant = adding_to(MUTANTS)


@mutant("fenced-gets-nothing", having("replace worker"))
def an_earlier_life_is_not_fenced(patch: Patch) -> None:
    real = Registry.check

    def check(self: Registry, identity: Identity) -> WorkerRecord:
        known = self._workers.get(identity.worker_id)
        life = identity.incarnation if known is None else known.incarnation
        return real(self, identity.model_copy(update={"incarnation": life}))

    patch.setattr(Registry, "check", check)
    patch.setattr(MemberTable, "check_incarnation", lambda self, name, _: self.check_known(name))


@mutant("fenced-gets-nothing")
def a_worker_that_is_out_is_answered(patch: Patch) -> None:
    real = Registry.check

    def check(self: Registry, identity: Identity) -> WorkerRecord:
        try:
            return real(self, identity)
        except (UnknownWorker, Evicted):
            known = self._workers.get(identity.worker_id)
            if known is None or known.incarnation != identity.incarnation:
                raise
            return known

    patch.setattr(Registry, "check", check)


@mutant("id-is-held", having("impostor"))
def a_live_worker_id_is_given_away(patch: Patch) -> None:
    during(patch, Registry, "register", Heartbeats, "live", answering(frozenset()))


@mutant("fenced-gets-nothing")
def a_new_life_gets_the_old_number(patch: Patch) -> None:
    real = MemberTable._find

    def earlier_life(
        self: MemberTable, kind: type[WorkerRecord], worker_id: str
    ) -> WorkerRecord | None:
        known = real(self, kind, worker_id)
        return known and replace(known, incarnation=known.incarnation - 1)

    during(patch, MemberTable, "register", MemberTable, "_find", earlier_life)


@mutant("generation-current")
def an_old_generation_is_answered(patch: Patch) -> None:
    patch.setattr(Registry, "check_generation", lambda self, _: self.generation)


@mutant("generation-moves")
def members_change_without_a_generation(patch: Patch) -> None:
    patch.setattr(MemberTable, "_renew", answering(None))


@mutant("operator-obeyed", having("operator"))
def a_kicked_worker_is_taken_in(patch: Patch) -> None:
    patch.setattr(Control, "check", answering(None))


@mutant("operator-obeyed", crowded("operator", "crash coordinator"))
def a_kick_that_a_crash_cut_in_two_stays_so(patch: Patch) -> None:
    patch.setattr(Membership, "finish_kicks", answering(None))


@mutant("operator-obeyed", having("operator"))
def a_pause_gives_rows_out(patch: Patch) -> None:
    during(patch, Assignments, "_next", Control, "command", never_paused())


@mutant("acked-is-durable", having("operator"))
def an_order_is_kept_in_memory_only(patch: Patch) -> None:
    during(patch, Control, "order", NamedValues, "set", answering(None))


@mutant("silent-is-evicted")
def nobody_is_ever_evicted(patch: Patch) -> None:
    patch.setattr(liveness, "scan", answering(False))


@mutant("silent-is-evicted")
def a_lease_on_life_never_expires(patch: Patch) -> None:
    patch.setattr(Heartbeats, "live", lambda _, candidates: frozenset(candidates))


@mutant("live-is-kept", having("kill worker"))
def a_lost_stream_is_taken_for_a_death_at_once(patch: Patch) -> None:
    real = Presence.__init__
    patch.setattr(Presence, "__init__", lambda self, clock: real(self, clock, grace_seconds=-1.0))


@mutant("refused-changes-nothing", having("impostor"))
def a_refused_registration_leaves_a_trace(patch: Patch) -> None:
    real = Registry.register

    def register(self: Registry, request: Any, **more: Any) -> Any:
        try:
            return real(self, request, **more)
        except WorkerTaken:
            known = self._workers[request.worker_id]
            with self.ledger.writing() as t:
                t.members.deregister(request.worker_id, known.incarnation, wall=0.0)
            raise

    patch.setattr(Registry, "register", register)
