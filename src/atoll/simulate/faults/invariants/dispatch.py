"""Dispatch: who holds which rows until when, under which policy, and what the queues say of it."""

from collections import Counter
from collections.abc import Iterable

from atoll.simulate.faults.durable import Row, View
from atoll.simulate.faults.invariants.base import ROUNDING_SECONDS, must
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
        if all(before.tables.get(t) == after.tables.get(t) for t in _TABLES):
            return
        moved = list(pairs(before, after))
        for was, lease in moved:
            self._check_policy(lease)
            self._check_end(was, lease, after, now=now)
            self._check_epoch(was, lease)
        self._check_lives(after)
        self._check_issue(moved, before, after)
        if before.tables.get("leases") != after.tables.get("leases") or (
            before.tables.get("queues") != after.tables.get("queues")
        ):
            _check_queues(after)
        self._hold(after, now=now)

    def _check_policy(self, lease: Row) -> None:
        right = lease["state"] != "given_up"
        if not self._reissues:
            right = lease["state"] not in ("reopened", "taken")
        must(right, "policy-kept", "{} where reissue={}", lease, self._reissues)

    def _check_epoch(self, was: Row | None, lease: Row) -> None:
        if was is None and lease["state"] == "reopened":
            return  # the end of one that was taken in part
        issue = "lease_epoch", "incarnation"
        if was is not None and all(was[name] == lease[name] for name in issue):
            return
        for row in range(lease["start"], lease["stop"]):
            place = lease["dataset_id"], row
            highest = self._epochs.get(place, 0)
            must(
                lease["lease_epoch"] > highest,
                "lease-epoch-grows",
                "{} issues row {}, which had lease epoch {}",
                lease,
                row,
                highest,
            )
            self._epochs[place] = lease["lease_epoch"]

    def _check_lives(self, view: View) -> None:
        for lease in view.leases:
            worker = view.workers[lease["worker_id"]]
            must(
                lease["state"] != "leased" or lease["incarnation"] == worker["incarnation"],
                "lease-of-latest-life",
                "{} where the worker is {}",
                lease,
                worker,
            )

    def _check_issue(self, moved: list[tuple[Row | None, Row]], before: View, after: View) -> None:
        issued = [now for was, now in moved if was is None and now["state"] == "leased"]
        if not issued:
            return
        for lease in issued:
            worker = after.workers[lease["worker_id"]]
            must(bool(worker["active"]), "members-get-rows", f"{lease} where it is {worker}")
        waiting = [
            now
            for was, now in moved
            if was is not None and was["state"] == now["state"] == "reopened"
        ]
        ends, were = _ends(after.leases), _ends(before.leases)
        must(
            ends == were or not waiting,
            "reopened-goes-first",
            f"rows up to {ends} are issued, before it were {were}, while {waiting[:3]} wait",
        )
        names = {row["dataset_id"]: row["name"] for row in after.rows("datasets")}
        whole, total = sum(self._weights.values()), sum(ends.values())
        for dataset_id, end in ends.items():
            lacks = self._weights[names[dataset_id]] * total - whole * end
            must(
                abs(lacks) <= whole * len(self._weights),
                "weights-followed",
                f"{ends} are issued of {names} with weights {self._weights}",
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
        must(
            0 < self._lease_seconds <= held + ROUNDING_SECONDS,
            "lease-ends-in-time",
            "{} ended after {:.3f} of {} s",
            lease,
            held,
            self._lease_seconds,
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
        must(not late, "lease-ends-in-time", f"{late} hold theirs for {self._lease_seconds} s")

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
    queues = {row["name"]: row for row in view.rows("queues")}
    touched: dict[str, set[int]] = {name: set() for name in queues}
    done: dict[str, Counter[int]] = {name: Counter() for name in queues}
    for lease in view.leases:
        name = f"{lease['dataset_id']}/{lease['shuffle_seed']}/{lease['epoch']}"
        queue = queues.get(name)
        must(queue is not None, "queue-agrees", "{} lies in {}, which is not there", lease, name)
        assert queue is not None
        first = _unit(queue, lease["epoch"], lease["start"])
        last = _unit(queue, lease["epoch"], lease["stop"] - 1)
        must(
            first == lease["unit"] and 0 <= first <= last < queue["units"],
            "lease-in-its-unit",
            "{} reaches from unit {} to {} of {}",
            lease,
            first,
            last,
            queue,
        )
        touched[name] |= set(range(first, last + 1))
        if lease["state"] == "done":
            rows = range(lease["start"], lease["stop"])
            done[name].update(_unit(queue, lease["epoch"], row) for row in rows)
    for name, queue in queues.items():
        whole = {unit for unit, rows in done[name].items() if rows >= _rows_of(queue, unit)}
        right = (_bitmap(touched[name], queue["units"]), _bitmap(whole, queue["units"]))
        must(
            (queue["issued"], queue["done"]) == right,
            "queue-agrees",
            "{} where the leases give {}",
            queue,
            right,
        )


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
