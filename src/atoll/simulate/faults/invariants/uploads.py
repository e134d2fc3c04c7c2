"""Uploads: what may be accepted, what a receipt stands for, and that it stays."""

from typing import Any

from atoll.ledger.records import ContributionRecord
from atoll.simulate.faults.asked import Asked
from atoll.simulate.faults.calls import Call
from atoll.simulate.faults.durable import Row, View
from atoll.simulate.faults.invariants.base import Violation
from atoll.simulate.faults.invariants.rows import span_of
from atoll.simulate.faults.reference import Reference
from atoll.simulate.faults.scenario import BLOCK
from atoll.simulate.faults.standin import Frame


class UploadsCheck:
    """Remembers every receipt that was given."""

    def __init__(self, reference: Reference, asked: Asked) -> None:
        self._reference = reference
        self._asked = asked
        self._receipts: dict[tuple[int, str], tuple[str, str]] = {}

    def changed(self, call: Call | None, before: View, after: View) -> None:
        """What the ledger accepted since, and by which message, was right."""
        for key in sorted(after.contributions.keys() - before.contributions.keys()):
            row = after.contributions[key]
            if call is None or call.kind != "commit" or call.frame is None:
                raise Violation(
                    "accepted-from-holder", f"{row} was accepted while {call} was handled"
                )
            self._check_accepted(call, call.frame, row, before)
            self._check_recorded(call.frame, row)
            self._check_weight(row, before)

    def answered(self, call: Call, value: Any, after: View) -> None:
        """A message was answered, perhaps with a receipt."""
        if isinstance(value, ContributionRecord):
            self._check_receipt(call, value, after)

    def _check_accepted(self, call: Call, frame: Frame, row: Row, before: View) -> None:
        header, identity = frame.header, call.identity
        worker = before.workers.get(row["worker_id"])
        if not (
            identity is not None
            and worker is not None
            and identity.worker_id == row["worker_id"] == header.worker_id
            and bool(worker["active"])
            and worker["incarnation"] == identity.incarnation == row["incarnation"]
        ):
            raise Violation(
                "accepted-from-holder", f"{call.sender} got {row} accepted, the ledger had {worker}"
            )
        open_round = before.rounds.get(row["applied"])
        leased = before.leased(row["round"], row["worker_id"])
        if not (
            open_round is not None
            and open_round["state"] == "open"
            and row["round"] == header.round
            and row["applied"] == self._destination(row["round"], before)
            and sorted(map(span_of, leased)) == sorted(header.ranges)
        ):
            raise Violation(
                "accepted-in-open-round",
                f"a contribution to round {header.round} with rows {header.ranges} was accepted "
                f"for {row['round']} by {row['applied']}; the round was {open_round}, leased "
                f"{leased}",
            )
        if not all(lease["incarnation"] == row["incarnation"] for lease in leased):
            raise Violation(
                "accepted-from-holder",
                f"life {row['incarnation']} of {row['worker_id']} got rows accepted that are "
                f"leased as {leased}",
            )
        base = self._reference.base(row["round"])
        if header.base_digest != base:
            raise Violation(
                "accepted-base",
                f"{row['worker_id']} started from {header.base_digest}, published was {base}",
            )

    def _check_recorded(self, frame: Frame, row: Row) -> None:
        header = frame.header
        said = (header.fragment, header.first or header.round, header.base_digest)
        recorded = (row["fragment"], row["first"], row["base"])
        if recorded != said:
            raise Violation(
                "accepted-as-sent",
                f"{row} is recorded of a frame that says fragment, first and base {said}",
            )

    def _destination(self, made_for: int, view: View) -> int | None:
        open_rounds = sorted(n for n, row in view.rounds.items() if row["state"] == "open")
        return self._asked.strategy_of(view, made_for).destination(made_for, open_rounds)

    def _check_weight(self, row: Row, before: View) -> None:
        leased = before.leased(row["round"], row["worker_id"])
        rows = sum(lease["stop"] - lease["start"] for lease in leased)
        tokens = rows * BLOCK
        weight = self._asked.strategy_of(before, row["round"]).weight(tokens=tokens)
        right = (rows, tokens, weight)
        if (row["rows"], row["tokens"], row["weight"]) != right:
            raise Violation(
                "weight-by-rule", f"{row} where the lease gives rows, tokens, weight {right}"
            )

    def _check_receipt(self, call: Call, record: ContributionRecord, after: View) -> None:
        frame = call.frame
        key = (record.round, record.worker_id)
        if not (
            frame is not None
            and record.sha256 == frame.sha256
            and key == (frame.header.round, call.worker_id)
        ):
            raise Violation(
                "receipt-matches",
                f"{call.sender} sent {None if frame is None else frame.sha256} and got {record}",
            )
        first = self._receipts.setdefault(key, (record.sha256, record.receipt))
        if first != (record.sha256, record.receipt):
            raise Violation(
                "receipt-matches",
                f"{key} got receipt {record.receipt} for {record.sha256}, and before {first}",
            )
        self._check_kept(key, after)

    def _check_kept(self, key: tuple[int, str], view: View) -> None:
        row = view.contributions.get(key)
        if row is None or (row["sha256"], row["receipt"]) != self._receipts[key]:
            raise Violation(
                "acked-is-durable", f"{key} has receipt {self._receipts[key]}, the ledger has {row}"
            )

    def acknowledged(self, view: View) -> None:
        """Every receipt ever given is in the ledger."""
        for key in self._receipts:
            self._check_kept(key, view)
