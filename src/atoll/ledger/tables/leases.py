"""Leases: which worker was given which rows for which round, and what became of them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from sqlalchemy import bindparam, func, select, update

from atoll.errors import LeaseLost, StoreError
from atoll.ledger.records import LeaseRecord, LeaseState, RoundPlan, RoundState, RowCount
from atoll.ledger.tables import schema
from atoll.ledger.tables.queues import QueueTable
from atoll.ledger.tables.table import RecordTable

Key = tuple[int, str]  # round, worker_id

_TABLE = schema.leases
_IN_ROUND = _TABLE.c.round == bindparam("in_round")
_OF_WORKER = _TABLE.c.worker_id == bindparam("of_worker")
_IS_LEASED = _TABLE.c.state == LeaseState.LEASED.value
_IS_REOPENED = _TABLE.c.state == LeaseState.REOPENED.value
_LIVES = select(schema.workers.c.worker_id, schema.workers.c.incarnation)
_PLACE = (_TABLE.c.dataset_id, _TABLE.c.start)
_OF_ROUND = (
    select(_TABLE).where(_IN_ROUND).order_by(_TABLE.c.worker_id, *_PLACE, _TABLE.c.lease_epoch)
)
_REOPENED = select(_TABLE).where(_IS_REOPENED).order_by(_TABLE.c.round, *_PLACE, _TABLE.c.worker_id)
_COUNTED_BY = (_TABLE.c.dataset_id, _TABLE.c.epoch, _TABLE.c.worker_id, _TABLE.c.state)
_LEASED_ROWS = func.sum(_TABLE.c.stop - _TABLE.c.start)
_COUNTS = select(*_COUNTED_BY, _LEASED_ROWS).group_by(*_COUNTED_BY).order_by(*_COUNTED_BY)
_END = update(_TABLE).where(_IN_ROUND, _OF_WORKER, _IS_LEASED)
_PUBLISHED = schema.newest_round(RoundState.PUBLISHED)
_OUTLIVING = (
    select(_TABLE)
    .where(_IS_LEASED, _TABLE.c.round <= _PUBLISHED)
    .order_by(_TABLE.c.round, _TABLE.c.worker_id, *_PLACE)
)
_HAND_OVER = (
    update(_TABLE)
    .where(_OF_WORKER, _IS_LEASED)
    .values(incarnation=bindparam("to_life"), lease_epoch=_TABLE.c.lease_epoch + 1)
)
_GIVE_TO = (
    update(_TABLE)
    .where(_IS_LEASED)
    .values(
        worker_id=bindparam("to_worker"),
        incarnation=bindparam("to_life"),
        lease_epoch=_TABLE.c.lease_epoch + 1,
    )
)
_HELD = (_IN_ROUND, _OF_WORKER, _TABLE.c.incarnation == bindparam("of_life"), _IS_LEASED)
_HELD_LEASES = select(_TABLE).where(*_HELD)
_FINISH = update(_TABLE).where(*_HELD).values(state=LeaseState.DONE.value)
_SPLIT_BY = ("round", "worker_id", "dataset_id", "start", "lease_epoch", "stop")
_SPLIT = update(_TABLE).where(
    *(_TABLE.c[name] == bindparam(f"of_{name}") for name in _SPLIT_BY), _IS_LEASED
)
_TAKEN_BY = ("round", "worker_id", "dataset_id", "start", "stop")
_TAKE = (
    update(_TABLE)
    .where(*(_TABLE.c[name] == bindparam(f"of_{name}") for name in _TAKEN_BY), _IS_REOPENED)
    .values(state=LeaseState.TAKEN.value)
)

_PIECES = {LeaseState.LEASED, LeaseState.REOPENED}


@dataclass
class LeaseTable(RecordTable):
    """Every lease there ever was: the truth about every row."""

    _queues: QueueTable

    def of_round(self, round_number: int) -> list[LeaseRecord]:
        """In (worker_id, dataset_id, start) order."""
        return self._records(LeaseRecord, _OF_ROUND, {"in_round": round_number})

    def reopened(self) -> list[LeaseRecord]:
        """Leases in state `reopened`, oldest round first, then by dataset_id and start."""
        return self._records(LeaseRecord, _REOPENED)

    def outliving(self) -> list[LeaseRecord]:
        """Leases still to be used though their round is published, oldest round first."""
        return self._records(LeaseRecord, _OUTLIVING)

    def counts(self) -> list[RowCount]:
        """Leased rows by (dataset_id, epoch, worker_id, state), in this order."""
        return self._records(RowCount, _COUNTS)

    def give_out(self, plan: RoundPlan) -> None:
        """Records what a plan takes and leaves of reopened leases, and its new leases."""
        self._take(plan.taken)
        self._keep_reopened(plan)
        self._queues.open(plan.queues)
        self._lease(plan)
        self._queues.mark_issued(plan.leases)

    def finish(self, round_number: int, worker_id: str, incarnation: int) -> None:
        """What a contribution was trained on is done; LeaseLost when this life has no lease."""
        held = {"in_round": round_number, "of_worker": worker_id, "of_life": incarnation}
        leases = self._records(LeaseRecord, _HELD_LEASES, held)
        if not leases:
            rule = "only leased rows are contributed, so wait for the next plan"
            raise LeaseLost(f"worker_id={worker_id!r} has no lease in round {round_number}; {rule}")
        self._connection.change(_FINISH, held)
        self._queues.mark_done(leases)

    def split(self, lease: LeaseRecord, pieces: Sequence[LeaseRecord]) -> None:
        """Puts pieces, leased and reopened ones, in the place of a lease that is still to be used.

        StoreError unless they are its rows, each once, in order.
        """
        ends = [lease.start, *(piece.stop for piece in pieces)]
        right = [
            replace(lease, start=start, stop=stop, unit=piece.unit, state=piece.state)
            for piece, start, stop in zip(pieces, ends, ends[1:], strict=False)
        ]
        states = {piece.state for piece in pieces}
        if right != list(pieces) or ends[-1] != lease.stop or not states <= _PIECES:
            raise StoreError(f"{list(pieces)!r} are not the rows of {lease!r}, each once, in order")
        first, *rest = pieces
        given = {f"of_{name}": getattr(lease, name) for name in _SPLIT_BY}
        changed = {"stop": first.stop, "state": first.state.value}
        if self._connection.change(_SPLIT, {**given, **changed}) != 1:
            raise StoreError(f"{lease!r} is not leased, so it cannot be cut into pieces")
        self._add(*rest)

    def end(self, keys: Collection[Key], *, reissue: bool) -> int:
        """Ends what is still leased under these keys; how many leases there were.

        They become `reopened`, or without `reissue` `given_up`.
        """
        ended = {"state": (LeaseState.REOPENED if reissue else LeaseState.GIVEN_UP).value}
        return sum(
            self._connection.change(_END, {"in_round": number, "of_worker": worker_id, **ended})
            for number, worker_id in sorted(keys)
        )

    def hand_over(self, worker_id: str, incarnation: int) -> None:
        """A new life of a worker takes over its leases that are still to be used."""
        self._connection.change(_HAND_OVER, {"of_worker": worker_id, "to_life": incarnation})

    def give_to(self, worker_id: str, incarnation: int) -> None:
        """This life of a worker takes over every lease that is still to be used, whoever's it was.

        Where a group trains together, its first member holds them for all.
        """
        self._connection.change(_GIVE_TO, {"to_worker": worker_id, "to_life": incarnation})

    def _take(self, taken: Sequence[LeaseRecord]) -> None:
        for lease in taken:
            given = {f"of_{name}": getattr(lease, name) for name in _TAKEN_BY}
            # Otherwise the same rows would be given out twice.
            if self._connection.change(_TAKE, given) != 1:
                rule = "so its rows cannot be given out again"
                raise StoreError(f"{lease!r} is not among the reopened leases, {rule}")

    def _keep_reopened(self, plan: RoundPlan) -> None:
        """Records the ends of taken leases that the plan does not need; they stay reopened."""
        for lease in plan.left:
            inside = any(
                (taken.round, taken.worker_id, taken.queue)
                == (lease.round, lease.worker_id, lease.queue)
                and taken.start < lease.start < lease.stop == taken.stop
                for taken in plan.taken
            )
            if not inside or lease.state is not LeaseState.REOPENED:
                raise StoreError(f"{lease!r} is not the reopened end of a lease that is taken")
        self._add(*plan.left)

    def _lease(self, plan: RoundPlan) -> None:
        for lease in plan.leases:
            if lease.round != plan.round or lease.state is not LeaseState.LEASED:
                rule = "a new lease is of that round and in state 'leased'"
                raise StoreError(f"{lease!r} cannot be given out with round {plan.round}; {rule}")
        # Written here, so that a lease belongs to the life that its worker has in this transaction.
        lives: dict[str, int] = dict(self._connection.rows(_LIVES))
        held = (replace(x, incarnation=lives.get(x.worker_id, x.incarnation)) for x in plan.leases)
        self._add(*held)
