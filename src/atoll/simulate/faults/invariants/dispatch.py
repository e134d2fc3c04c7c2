"""Dispatch: who holds which rows until when, under which policy, and what the queues say of it."""

from collections import Counter
from collections.abc import Iterable

from atoll.simulate.faults.durable import Row, View
from atoll.simulate.faults.invariants.base import ROUNDING_SECONDS, Violation
from atoll.simulate.faults.invariants.rows import pairs
from atoll.simulate.faults.scenario import Scenario

_TABLES = ("leases", "rounds", "workers", "queues", "control")


class Dispatch:
    """Follows lease epochs, deadlines and bitmaps beside the coordinator."""

    def __init__(self, scenario: Scenario) -> None:
        work = scenario.settings["work"]
        self._lease_seconds: float = work["lease_seconds"]
        self._reissues = work["policy"] == "exactly_once"
        entries = scenario.data.get("datasets", [{"name": scenario.data["kind"], "weight": 1}])
        self._weights: dict[str, int] = {entry["name"]: entry["weight"] for entry in entries}
        self._epochs: dict[tuple[str, int], int] = {}  # row -> its highest lease epoch
        self._since: dict[tuple[int, str], float] = {}  # held in an open round since

    def changed(self, before: View, after: View, *, now: float) -> None:
        """What is leased, to whom and in which queue is as it may be."""
        if not after.differs(before, *_TABLES):
            return
        moved = list(pairs(before, after))
        for was, lease in moved:
            self._check_policy(lease)
            self._check_end(was, lease, after, now=now)
            self._check_epoch(was, lease)
        self._check_lives(after)
        self._check_issue(moved, before, after)
        if after.differs(before, "leases", "queues"):
            _check_queues(after)
        self._hold(after, now=now)

    def _check_policy(self, lease: Row) -> None:
        right = lease["state"] != "given_up"
        if not self._reissues:
            right = lease["state"] not in ("reopened", "taken")
        if not right:
            raise Violation("policy-kept", f"{lease} where reissue={self._reissues}")

    def _check_epoch(self, was: Row | None, lease: Row) -> None:
        if was is None and lease["state"] == "reopened":
            return  # the end of one that was taken in part
        issue = "lease_epoch", "incarnation"
        if was is not None and all(was[name] == lease[name] for name in issue):
            return
        for row in range(lease["start"], lease["stop"]):
            place = lease["dataset_id"], row
            highest = self._epochs.get(place, 0)
            if lease["lease_epoch"] <= highest:
                raise Violation(
                    "lease-epoch-grows",
                    f"{lease} issues row {row}, which had lease epoch {highest}",
                )
            self._epochs[place] = lease["lease_epoch"]

    def _check_lives(self, view: View) -> None:
        for lease in view.leases:
            worker = view.workers[lease["worker_id"]]
            if lease["state"] == "leased" and lease["incarnation"] != worker["incarnation"]:
                raise Violation("lease-of-latest-life", f"{lease} where the worker is {worker}")

    def _check_issue(self, moved: list[tuple[Row | None, Row]], before: View, after: View) -> None:
        issued = [now for was, now in moved if was is None and now["state"] == "leased"]
        if not issued:
            return
        for lease in issued:
            worker = after.workers[lease["worker_id"]]
            if not worker["active"]:
                raise Violation("members-get-rows", f"{lease} where it is {worker}")
        waiting = [
            now
            for was, now in moved
            if was is not None and was["state"] == now["state"] == "reopened"
        ]
        ends, were = _ends(after.leases), _ends(before.leases)
        if ends != were and waiting:
            raise Violation(
                "reopened-goes-first",
                f"rows up to {ends} are issued, before it were {were}, while {waiting[:3]} wait",
            )
        names = {row["dataset_id"]: row["name"] for row in after.table("datasets").rows}
        whole, total = sum(self._weights.values()), sum(ends.values())
        for dataset_id, end in ends.items():
            lacks = self._weights[names[dataset_id]] * total - whole * end
            if abs(lacks) > whole * len(self._weights):
                raise Violation(
                    "weights-followed", f"{ends} are issued of {names} with weights {self._weights}"
                )

    # Deadlines

    def _hold(self, view: View, *, now: float) -> None:
        # While the operator keeps everybody from training, no time runs.
        is_running = view.control.get("action") != "pause"
        keys = [
            (number, worker_id)
            for number, row in sorted(view.rounds.items())
            if row["state"] == "open" and is_running
            for worker_id in sorted(view.holding(number))
        ]
        self._since = {key: self._since.get(key, now) for key in keys}

    def _check_end(self, was: Row | None, lease: Row, view: View, *, now: float) -> None:
        if (
            was is None
            or was["state"] != "leased"
            or lease["state"] not in ("reopened", "given_up")
        ):
            return
        number = lease["round"]
        if view.rounds[number]["state"] != "open":
            return  # it ended with its round
        held = now - self._since.get((number, lease["worker_id"]), now)
        if not (0 < self._lease_seconds <= held + ROUNDING_SECONDS):
            raise Violation(
                "lease-ends-in-time", f"{lease} ended after {held:.3f} of {self._lease_seconds} s"
            )

    def advanced(self, view: View, *, now: float) -> None:
        """The closing thread had its look: what is overdue is over."""
        if not self._lease_seconds:
            return
        late = [
            worker_id
            for (number, worker_id), since in self._since.items()
            if now - since > self._lease_seconds + ROUNDING_SECONDS
            and (number, worker_id) not in view.contributions
        ]
        if late:
            raise Violation("lease-ends-in-time", f"{late} hold theirs for {self._lease_seconds} s")

    def restarted(self, view: View, *, now: float) -> None:
        """Deadlines are in memory: every lease has its full time again."""
        self._since.clear()
        self._hold(view, now=now)


def _ends(leases: Iterable[Row]) -> dict[str, int]:
    """Where the leases of each dataset end."""
    ends: dict[str, int] = {}
    for lease in leases:
        name = lease["dataset_id"]
        ends[name] = max(ends.get(name, 0), lease["stop"])
    return ends


# Queues, computed once more


def _check_queues(view: View) -> None:
    queues = view.table("queues").by("name")
    touched: dict[str, set[int]] = {name: set() for name in queues}
    done: dict[str, Counter[int]] = {name: Counter() for name in queues}
    for lease in view.leases:
        name = f"{lease['dataset_id']}/{lease['shuffle_seed']}/{lease['epoch']}"
        queue = queues.get(name)
        if queue is None:
            raise Violation("queue-agrees", f"{lease} lies in {name}, which is not there")
        first = _unit(queue, lease["epoch"], lease["start"])
        last = _unit(queue, lease["epoch"], lease["stop"] - 1)
        if not (first == lease["unit"] and 0 <= first <= last < queue["units"]):
            raise Violation(
                "lease-in-its-unit", f"{lease} reaches from unit {first} to {last} of {queue}"
            )
        touched[name] |= set(range(first, last + 1))
        if lease["state"] == "done":
            rows = range(lease["start"], lease["stop"])
            done[name].update(_unit(queue, lease["epoch"], row) for row in rows)
    for name, queue in queues.items():
        whole = {unit for unit, rows in done[name].items() if rows >= _rows_of(queue, unit)}
        right = (_bitmap(touched[name], queue["units"]), _bitmap(whole, queue["units"]))
        if (queue["issued"], queue["done"]) != right:
            raise Violation("queue-agrees", f"{queue} where the leases give {right}")


def _unit(queue: Row, epoch: int, row: int) -> int:
    length, units = queue["length"], queue["units"]
    if not length:
        return int(row // queue["unit_rows"])
    within = row - epoch * length
    # The unit u with u*L//K <= row < (u+1)*L//K.
    return int(((within + 1) * units - 1) // length) if 0 <= within < length else -1


def _rows_of(queue: Row, unit: int) -> int:
    length, units = queue["length"], queue["units"]
    if not length:
        return int(queue["unit_rows"])
    return int((unit + 1) * length // units - unit * length // units)


def _bitmap(bits: set[int], size: int) -> bytes:
    return sum(1 << bit for bit in bits).to_bytes((size + 7) // 8, "little")
