"""Dispatch: who holds which rows until when, under which policy, and what the queues say of it."""

from collections import Counter

from atoll.simulate.faults.durable import Row, View
from atoll.simulate.faults.invariants.base import ROUNDING_SECONDS, Seen, Violation, check
from atoll.simulate.faults.invariants.pieces import Pieces
from atoll.simulate.faults.invariants.rows import pairs, rows_of

_TABLES = ("leases", "rounds", "workers", "queues", "control")
_MAY_NOT = {
    "exactly_once": ("given_up",),
    "at_most_once": ("reopened", "taken"),
}  # states by policy


class Dispatch:
    """Follows lease epochs, deadlines and bitmaps beside the coordinator."""

    def __init__(self, seen: Seen) -> None:
        scenario = seen.world.scenario
        self._seen = seen
        self._work = scenario.settings["work"]
        self._lease_seconds: float = self._work["lease_seconds"]
        entries = scenario.data.get("datasets", [{"name": scenario.data["kind"], "weight": 1}])
        self._weights: dict[str, int] = {entry["name"]: entry["weight"] for entry in entries}
        self._epochs: dict[tuple[str, int], int] = {}  # row -> its highest lease epoch
        self._since: dict[tuple[int, str], float] = {}  # held in an open round since
        self._pieces = Pieces(seen)

    def changed(self, before: View, after: View) -> None:
        """What is leased, to whom and in which queue is as it may be."""
        if not after.differs(before, *_TABLES):
            return
        moved, policy = pairs(before, after), self._work["policy"]
        for was, lease in moved:
            check("policy-kept", lease.state not in _MAY_NOT[policy], lease=lease, policy=policy)
            self._check_end(was, lease, after)
            self._check_epoch(was, lease)
        for lease in after.table("leases").grouped("state").get("leased", ()):
            worker = after.workers[lease.worker_id]
            is_latest = lease.incarnation == worker.incarnation
            check("lease-of-latest-life", is_latest, lease=lease, worker=worker)
        self._check_issue(moved, before, after)
        if after.differs(before, "leases", "queues"):
            _check_queues(after)
        self._hold(after)

    def _check_epoch(self, was: Row | None, lease: Row) -> None:
        if was is None and lease.state == "reopened":
            return  # the end of one that was taken in part
        issue = (lease.lease_epoch, lease.incarnation)
        if was is not None and (was.lease_epoch, was.incarnation) == issue:
            return
        for row in rows_of(lease):
            highest = self._epochs.get(row, 0)
            check("lease-epoch-grows", lease.lease_epoch > highest, row=row, of=lease, had=highest)
            self._epochs[row] = lease.lease_epoch

    def _check_issue(self, moved: list[tuple[Row | None, Row]], before: View, after: View) -> None:
        issued = [now for was, now in moved if was is None and now.state == "leased"]
        if not issued:
            return
        for lease in issued:
            worker = after.workers[lease.worker_id]
            check("members-get-rows", worker.active, lease=lease, worker=worker)
        self._pieces.issued(issued, before, after)
        waiting = [now for was, now in moved if was and was.state == now.state == "reopened"]
        ends, were = after.ends, before.ends
        is_fresh = ends != were
        check("reopened-goes-first", not (is_fresh and waiting), were=were, ends=ends, wait=waiting)
        names = {row.dataset_id: row.name for row in after.table("datasets").rows}
        whole, total = sum(self._weights.values()), sum(ends.values())
        for dataset_id, end in ends.items():
            lacks = self._weights[names[dataset_id]] * total - whole * end
            is_near = abs(lacks) <= whole * len(self._weights)
            check("weights-followed", is_near, issued=ends, of=names, weights=self._weights)

    # Deadlines

    def _hold(self, view: View) -> None:
        # While the operator keeps everybody from training, no time runs.
        is_running = view.control.get("action") != "pause"
        held = {
            (number, worker_id)
            for number, row in view.rounds.items()
            if row.state == "open"
            for worker_id in view.holding(number)
        }
        for lease in view.table("leases").grouped("state").get("leased", ()):
            if view.rounds[lease.round].state != "planned":
                held.add((lease.round, lease.worker_id))  # its round may be closed
        keys = sorted(held) if is_running else []
        self._since = {key: self._since.get(key, self._seen.now) for key in keys}

    def _check_end(self, was: Row | None, lease: Row, view: View) -> None:
        """A lease that ends before its round does has had its time."""
        ends = was and was.state == "leased" and lease.state in ("reopened", "given_up")
        skipped = view.table("skips").grouped("round", "worker_id")
        is_skipped = (lease.round, lease.worker_id) in skipped
        if ends and view.rounds[lease.round].state == "open" and not is_skipped:
            now = self._seen.now
            held = now - self._since.get((lease.round, lease.worker_id), now)
            is_over = 0 < self._lease_seconds <= held + ROUNDING_SECONDS
            check("lease-ends-in-time", is_over, lease=lease, held=held, of=self._lease_seconds)

    def advanced(self, view: View) -> None:
        """The closing thread had its look: what is overdue is over."""
        longest = self._lease_seconds + ROUNDING_SECONDS
        for key, since in self._since.items():
            if self._lease_seconds and self._seen.now - since > longest:
                is_in = key in view.contributions
                check("lease-ends-in-time", is_in, held_by=key, since=since, now=self._seen.now)

    def restarted(self, view: View) -> None:
        """Deadlines are in memory: every lease has its full time again."""
        self._since.clear()
        self._hold(view)


# Queues, computed once more


def _check_queues(view: View) -> None:
    queues = view.table("queues").by("name")
    touched: dict[str, set[int]] = {name: set() for name in queues}
    done: dict[str, Counter[int]] = {name: Counter() for name in queues}
    for lease in view.leases:
        name = f"{lease.dataset_id}/{lease.shuffle_seed}/{lease.epoch}"
        if name not in queues:
            raise Violation("queue-agrees", lease=lease, in_no_queue=name)
        queue = queues[name]
        first, last = (_unit(queue, lease.epoch, row) for row in (lease.start, lease.stop - 1))
        is_within = first == lease.unit and 0 <= first <= last < queue.units
        check("lease-in-its-unit", is_within, lease=lease, first=first, last=last, of=queue)
        touched[name].update(range(first, last + 1))
        if lease.state == "done":
            rows = range(lease.start, lease.stop)
            done[name].update(_unit(queue, lease.epoch, row) for row in rows)
    for name, queue in queues.items():
        whole = {unit for unit, rows in done[name].items() if rows >= _unit_rows(queue, unit)}
        right = (_bitmap(touched[name], queue.units), _bitmap(whole, queue.units))
        check("queue-agrees", (queue.issued, queue.done) == right, queue=queue, leases_give=right)


def _unit(queue: Row, epoch: int, row: int) -> int:
    if not queue.length:
        return int(row // queue.unit_rows)
    within = row - epoch * queue.length
    # The unit u with u*L//K <= row < (u+1)*L//K.
    is_inside = 0 <= within < queue.length
    return int(((within + 1) * queue.units - 1) // queue.length) if is_inside else -1


def _unit_rows(queue: Row, unit: int) -> int:
    if not queue.length:
        return int(queue.unit_rows)
    return int((unit + 1) * queue.length // queue.units - unit * queue.length // queue.units)


def _bitmap(bits: set[int], size: int) -> bytes:
    return sum(1 << bit for bit in bits).to_bytes((size + 7) // 8, "little")
