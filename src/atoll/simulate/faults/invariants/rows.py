"""Rows: each is under one lease at a time, none is lost, each counts once."""

from collections.abc import Iterable, Sequence

from atoll.rows import RowRange
from atoll.simulate.faults.durable import Row, View
from atoll.simulate.faults.invariants.base import Violation
from atoll.wire.header import FrameHeader

_MOVES = {
    ("leased", "done"),
    ("leased", "reopened"),
    ("leased", "given_up"),
    ("reopened", "taken"),
}


def span_of(lease: Row) -> RowRange:
    """The rows of a lease."""
    return RowRange(lease["dataset_id"], lease["start"], lease["stop"])


def pairs(before: View, after: View) -> Iterable[tuple[Row | None, Row]]:
    """Every lease with what it was; issued in the same place again, it is another lease."""
    earlier = dict(before.places)
    for place, leases in after.places.items():
        was = earlier.pop(place, [])
        if len(was) > len(leases):
            raise Violation("row-not-lost", f"{was} became {leases}")
        yield from zip([*was, *[None] * (len(leases) - len(was))], leases, strict=True)
    if earlier:
        raise Violation("row-not-lost", f"leases vanished: {sorted(earlier)}")


def _is_folded(lease: Row, view: View) -> bool:
    """Whether the contribution with these rows is in a published version."""
    made = view.contributions[lease["round"], lease["worker_id"]]
    return bool(view.rounds[made["applied"]]["state"] == "published")


class Rows:
    """Follows every lease from its issue to its end."""

    def __init__(self) -> None:
        self._counted: dict[tuple[str, int], tuple[int, str]] = {}  # row -> whose contribution

    def changed(self, before: View, after: View) -> None:
        """The leases moved as they may, and still share out every row once."""
        if not after.differs(before, "leases", "rounds", "contributions"):
            return
        for was, lease in pairs(before, after):
            self._check_move(was, lease)
        self._check_shares(after)
        self._check_together(after)

    def _check_move(self, was: Row | None, lease: Row) -> None:
        if was is None:
            return
        if not (
            was["stop"] == lease["stop"]
            and (was["state"] == lease["state"] or (was["state"], lease["state"]) in _MOVES)
        ):
            raise Violation("row-issued-once", f"{was} became {lease}")

    def _check_shares(self, view: View) -> None:
        ends: dict[str, int] = {}
        holder: dict[tuple[str, int], Row] = {}
        for lease in view.leases:
            name = lease["dataset_id"]
            if lease["state"] == "taken":
                continue
            ends[name] = max(ends.get(name, 0), lease["stop"])
            for row in range(lease["start"], lease["stop"]):
                other = holder.setdefault((name, row), lease)
                if other is not lease:
                    raise Violation("row-issued-once", f"row {row} is in {other} and {lease}")
        missing = [(name, row) for name in ends for row in range(ends[name])]
        missing = [row for row in missing if row not in holder]
        if missing:
            raise Violation("row-not-lost", f"rows {missing[:8]} below {ends} belong to nobody")
        cursor = max((row["cursor"] for row in view.rounds.values()), default=0)
        if sum(ends.values()) < cursor:
            raise Violation(
                "row-not-lost", f"leases reach {ends}, the newest round records {cursor}"
            )
        if sum(ends.values()) > cursor:
            raise Violation(
                "row-issued-once", f"leases reach {ends}, the newest round records {cursor}"
            )
        self._check_reissued(view, holder)

    def _check_together(self, view: View) -> None:
        """A lease is done exactly when its contribution is there, and open while its round is."""
        for lease in view.leases:
            number, worker_id = lease["round"], lease["worker_id"]
            is_done, is_in = lease["state"] == "done", (number, worker_id) in view.contributions
            if is_done != is_in and lease["state"] not in ("reopened", "taken", "given_up"):
                raise Violation(
                    "moves-together",
                    f"{lease} and the contribution of {worker_id} to round {number}",
                )
            is_over = view.rounds[number]["state"] not in ("planned", "open")
            if lease["state"] == "leased" and is_over:
                raise Violation("row-not-lost", f"{lease} outlived its round")

    def _check_reissued(self, view: View, holder: dict[tuple[str, int], Row]) -> None:
        """Rows that were taken back are in the hands of a later lease."""
        for lease in view.leases:
            if lease["state"] != "taken":
                continue
            for row in range(lease["start"], lease["stop"]):
                now = holder[lease["dataset_id"], row]
                # Of the same epoch: said by lease-epoch-grows.
                later = now["lease_epoch"] >= lease["lease_epoch"] or now["state"] == "reopened"
                if not later:
                    raise Violation(
                        "row-issued-once", f"row {row} of {lease} was issued again as {now}"
                    )

    def told(
        self, worker_id: str, round_number: int, ranges: Sequence[RowRange], view: View
    ) -> None:
        """A worker was told to train these rows."""
        held = sorted(map(span_of, view.leased(round_number, worker_id)))
        # What is leased moves only as leases may, so it is the same each time it is told.
        if sorted(ranges) != held:
            raise Violation(
                "lease-is-stable",
                f"{worker_id} was told {ranges} of round {round_number}, leased to it are {held}",
            )

    def counted(self, number: int, worker_id: str, header: FrameHeader, view: View) -> None:
        """A contribution with this header entered an outer step."""
        leased = view.leased(number, worker_id, "done")
        spans = sorted(header.ranges)
        if sorted(map(span_of, leased)) != spans:
            raise Violation(
                "row-counted-once",
                f"{worker_id} was counted with {spans} in round {number}, done are {leased}",
            )
        for span in spans:
            for row in range(span.start, span.stop):
                other = self._counted.setdefault((span.dataset_id, row), (number, worker_id))
                if other != (number, worker_id):
                    raise Violation(
                        "row-counted-once",
                        f"row {row} counted for {other} and for {(number, worker_id)}",
                    )

    def finished(self, view: View) -> None:
        """At the end: what is done is what was counted."""
        done = {
            (lease["dataset_id"], row)
            for lease in view.leases
            if lease["state"] == "done" and _is_folded(lease, view)
            for row in range(lease["start"], lease["stop"])
        }
        if done != set(self._counted):
            raise Violation(
                "row-counted-once",
                f"done and counted differ in {sorted(done ^ set(self._counted))[:8]}",
            )
