"""Rows: each is under one lease at a time, none is lost, each counts once."""

from atoll.simulate.faults.durable import Row, View
from atoll.simulate.faults.invariants.base import must

_MOVES = {
    ("leased", "done"),
    ("leased", "reopened"),
    ("reopened", "taken"),
}
_TABLES = ("leases", "rounds", "contributions")
Key = tuple[int, str, int]


def _key(lease: Row) -> Key:
    return lease["round"], lease["worker_id"], lease["start"]


class Rows:
    """Follows every lease from its issue to its end."""

    def __init__(self) -> None:
        self._told: dict[tuple[int, str], tuple[tuple[int, int], ...]] = {}
        self._counted: dict[int, tuple[int, str]] = {}  # row -> whose contribution

    def changed(self, before: View, after: View) -> None:
        """The leases moved as they may, and still share out every row once."""
        if all(before.tables.get(t) == after.tables.get(t) for t in _TABLES):
            return
        earlier = {_key(lease): lease for lease in before.leases}
        for lease in after.leases:
            self._check_move(earlier.pop(_key(lease), None), lease)
        must(not earlier, "row-not-lost", f"leases vanished: {sorted(earlier)}")
        self._check_shares(after)
        self._check_together(after)

    def _check_move(self, was: Row | None, lease: Row) -> None:
        if was is None:
            return
        must(
            was["stop"] == lease["stop"]
            and (was["state"] == lease["state"] or (was["state"], lease["state"]) in _MOVES),
            "row-issued-once",
            f"{was} became {lease}",
        )

    def _check_shares(self, view: View) -> None:
        cursor = max((row["cursor"] for row in view.rounds.values()), default=0)
        holder: dict[int, Row] = {}
        for lease in view.leases:
            if lease["state"] == "taken":
                continue
            for row in range(lease["start"], lease["stop"]):
                other = holder.setdefault(row, lease)
                must(other is lease, "row-issued-once", f"row {row} is in {other} and {lease}")
        missing = [row for row in range(cursor) if row not in holder]
        must(not missing, "row-not-lost", f"rows {missing[:8]} below {cursor} belong to nobody")
        beyond = [row for row in holder if row >= cursor]
        must(not beyond, "row-issued-once", f"rows {beyond[:8]} are leased beyond {cursor}")
        self._check_reissued(view, holder)

    def _check_together(self, view: View) -> None:
        """A lease is done exactly when its contribution is there, and open while its round is."""
        for lease in view.leases:
            number, worker_id = lease["round"], lease["worker_id"]
            must(
                (lease["state"] == "done") == ((number, worker_id) in view.contributions)
                or lease["state"] in ("reopened", "taken"),
                "moves-together",
                f"{lease} and the contribution of {worker_id} to round {number}",
            )
            must(
                lease["state"] != "leased" or view.rounds[number]["state"] in ("planned", "open"),
                "row-not-lost",
                f"{lease} outlived its round",
            )

    def _check_reissued(self, view: View, holder: dict[int, Row]) -> None:
        """Rows that were taken back are in the hands of a later lease."""
        for lease in view.leases:
            if lease["state"] != "taken":
                continue
            for row in range(lease["start"], lease["stop"]):
                now = holder[row]
                later = now["round"] > lease["round"] or now["state"] == "reopened"
                must(later, "row-issued-once", f"row {row} of {lease} was issued again as {now}")

    def told(self, worker_id: str, round_number: int, ranges: tuple[tuple[int, int], ...]) -> None:
        """A worker was told to train these rows."""
        first = self._told.setdefault((round_number, worker_id), ranges)
        # A round may be filled up with another worker, never with other rows for the same one.
        must(
            first == ranges,
            "lease-is-stable",
            f"{worker_id} was told {first} of round {round_number}, and now {ranges}",
        )

    def counted(
        self, round_number: int, worker_id: str, ranges: list[tuple[int, int]], view: View
    ) -> None:
        """A contribution that names these rows entered an outer step."""
        leased = sorted(
            (lease["start"], lease["stop"])
            for lease in view.leases
            if (lease["round"], lease["worker_id"], lease["state"])
            == (round_number, worker_id, "done")
        )
        must(
            leased == sorted(ranges),
            "row-counted-once",
            f"{worker_id} was counted with {ranges} in round {round_number}, done are {leased}",
        )
        for start, stop in ranges:
            for row in range(start, stop):
                other = self._counted.setdefault(row, (round_number, worker_id))
                must(
                    other == (round_number, worker_id),
                    "row-counted-once",
                    f"row {row} counted for {other} and for {(round_number, worker_id)}",
                )

    def finished(self, view: View) -> None:
        """At the end: what is done is what was counted."""
        done = {
            row
            for lease in view.leases
            if lease["state"] == "done" and view.rounds[lease["round"]]["state"] == "published"
            for row in range(lease["start"], lease["stop"])
        }
        must(
            done == set(self._counted),
            "row-counted-once",
            f"done and counted differ in {sorted(done ^ set(self._counted))[:8]}",
        )
