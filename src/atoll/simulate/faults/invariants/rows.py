"""Rows: each is under one lease at a time, none is lost, each counts once."""

from functools import lru_cache
from itertools import zip_longest

from atoll.protocol.messages import Assignment, AssignmentRequest
from atoll.rows import RowRange
from atoll.simulate.faults.durable import Row, View
from atoll.simulate.faults.invariants.base import Violation, check
from atoll.simulate.faults.rules import Rules
from atoll.strategies.base import ALL
from atoll.wire.header import FrameHeader

_MOVES = {
    ("leased", "done"),
    ("leased", "reopened"),
    ("leased", "given_up"),
    ("reopened", "taken"),
}


def span_of(lease: Row) -> RowRange:
    """The rows of a lease."""
    return RowRange(lease.dataset_id, lease.start, lease.stop)


def rows_of(span: RowRange | Row) -> list[tuple[str, int]]:
    """Every row of a range or a lease: its dataset and its place there."""
    return [(span.dataset_id, row) for row in range(span.start, span.stop)]


@lru_cache(maxsize=1)
def pairs(before: View, after: View) -> list[tuple[Row | None, Row]]:
    """Every lease with what it was; issued in the same place again, it is another lease."""
    found: list[tuple[Row | None, Row]] = []
    earlier = dict(before.places)
    for place, leases in after.places.items():
        was = earlier.pop(place, [])
        check("row-not-lost", len(was) <= len(leases), was=was, became=leases)
        found += zip_longest(was, leases)
    check("row-not-lost", not earlier, vanished=earlier)
    return found


class Rows:
    """Follows every lease from its issue to its end."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._counted: dict[tuple[str, int], tuple[int, str]] = {}  # row -> whose contribution
        self._newest: dict[tuple[int, str], int] = {}  # fragment, worker -> its last round in it

    def changed(self, before: View, after: View) -> None:
        """The leases moved as they may, and still share out every row once."""
        if not after.differs(before, "leases", "rounds", "contributions"):
            return
        for was, lease in pairs(before, after):
            if was is not None:
                moves = was.state == lease.state or (was.state, lease.state) in _MOVES
                check("row-issued-once", moves and was.stop == lease.stop, was=was, became=lease)
        self._check_shares(after)
        self._check_together(after)

    def _check_shares(self, view: View) -> None:
        holder: dict[tuple[str, int], Row] = {}
        for lease in view.leases:
            for row in rows_of(lease) if lease.state != "taken" else ():
                if holder.setdefault(row, lease) is not lease:
                    raise Violation("row-issued-once", row=row, leases=(holder[row], lease))
        below = [(name, row) for name, end in view.ends.items() for row in range(end)]
        missing = [row for row in below if row not in holder]
        check("row-not-lost", not missing, of_nobody=missing[:8], ends=view.ends)
        cursor = max((row.cursor for row in view.rounds.values()), default=0)
        reached = sum(view.ends.values())
        check("row-not-lost", reached >= cursor, ends=view.ends, recorded=cursor)
        check("row-issued-once", reached <= cursor, ends=view.ends, recorded=cursor)
        self._check_reissued(view, holder)

    def _check_together(self, view: View) -> None:
        """A lease is done exactly when its contribution is there, and ends when none can come."""
        for lease in view.leases:
            if lease.state in ("leased", "done"):
                is_in = (lease.round, lease.worker_id) in view.contributions
                check("moves-together", (lease.state == "done") == is_in, lease=lease, is_in=is_in)
            if lease.state == "leased":
                is_taken = self._rules.destination(lease.round, view.open_rounds) is not None
                is_going_on = is_taken or view.rounds[lease.round].state == "planned"
                check("row-not-lost", is_going_on, outlived_its_round=lease)

    def _check_reissued(self, view: View, holder: dict[tuple[str, int], Row]) -> None:
        """Rows that were taken back are in the hands of a later lease."""
        for lease in view.leases:
            for row in rows_of(lease) if lease.state == "taken" else ():
                now = holder[row]
                # Of the same epoch: said by lease-epoch-grows.
                if now.lease_epoch < lease.lease_epoch and now.state != "reopened":
                    raise Violation("row-issued-once", row=row, of=lease, issued_again_as=now)

    def told(self, asked: AssignmentRequest, given: Assignment, view: View) -> None:
        """A worker was told to train these rows."""
        worker_id = asked.identity.worker_id
        held = sorted(map(span_of, view.leased(given.round or 0, worker_id)))
        # What is leased moves only as leases may, so it is the same each time it is told.
        check("lease-is-stable", sorted(given.ranges) == held, who=worker_id, told=given, held=held)
        leased = view.table("leases").grouped("worker_id", "state").get((worker_id, "leased"), ())
        # Rounds under way are those that it says it trains or hands in.
        idle = (lease for lease in leased if lease.round not in asked.under_way)
        older = [lease for lease in idle if lease.round < (given.round or 0)]
        check("one-lease-at-a-time", not older, who=worker_id, told=given, older=older)

    def counted(self, made: Row, header: FrameHeader, view: View) -> None:
        """A contribution with this header entered an outer step."""
        done = sorted(map(span_of, view.leased(made.round, made.worker_id, "done")))
        check("row-counted-once", done == sorted(header.ranges), counted=header, done=done)
        whose = (made.round, made.worker_id)
        for row in (row for span in header.ranges for row in rows_of(span)):
            if self._counted.setdefault(row, whose) != whose:
                raise Violation("row-counted-once", row=row, of=(self._counted[row], whose))
        self._count_pairs(made, view)

    def _count_pairs(self, made: Row, view: View) -> None:
        """Rows of all rounds from the first that it contains to its own are in its fragment now."""
        handed_in = {n for n, worker_id in view.contributions if worker_id == made.worker_id}
        leased = view.table("leases").grouped("worker_id").get(made.worker_id, ())
        lost = {lease.round for lease in leased if made.first <= lease.round < made.round}
        missed = lost - handed_in
        check("pair-counted-once", not missed, counted=made, not_handed_in=missed)
        key = (made.fragment, made.worker_id)
        newest = self._newest.get(key, 0)
        is_new = newest < made.first or made.fragment == ALL  # which takes in what is left
        check("pair-counted-once", is_new, counted=made, counted_up_to=newest)
        self._newest[key] = made.round

    def finished(self, view: View) -> None:
        """At the end: what is done, in contributions of published rounds, is what was counted."""
        done = set()
        for lease in view.table("leases").grouped("state").get("done", ()):
            made = view.contributions[lease.round, lease.worker_id]
            if view.rounds[made.applied].state == "published":
                done.update(rows_of(lease))
        differing = sorted(done ^ set(self._counted))
        check("row-counted-once", not differing, done_or_counted_alone=differing[:8])
