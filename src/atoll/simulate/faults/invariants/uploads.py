"""Uploads: what may be accepted, what a receipt stands for, and that it stays."""

from typing import Any

from atoll.ledger.records import ContributionRecord
from atoll.protocol.gather import AnnounceReply
from atoll.simulate.faults.calls import Call
from atoll.simulate.faults.durable import Row, View
from atoll.simulate.faults.invariants.base import Seen, Violation, check
from atoll.simulate.faults.invariants.rows import span_of
from atoll.simulate.faults.scenario import BLOCK
from atoll.wire.header import FrameHeader


class UploadsCheck:
    """Remembers every receipt that was given."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._receipts: dict[tuple[int, str], tuple[str, str]] = {}

    def changed(self, before: View, after: View) -> None:
        """What the ledger accepted since, and by which message, was right."""
        for key in sorted(after.contributions.keys() - before.contributions.keys()):
            row, call = after.contributions[key], self._seen.call
            if call is None or call.kind not in ("commit", "announce") or call.frame is None:
                raise Violation("accepted-from-holder", accepted=row, handled=call)
            header = call.frame.header
            self._check_accepted(call, header, row, before)
            said = (
                *(header.fragment, header.first or header.round, header.base_digest),
                *(header.residual, header.carried),
            )
            recorded = (row.fragment, row.first, row.base, row.residual, row.carried)
            check("accepted-as-sent", recorded == said, said=said, recorded=row)
            self._check_weight(row, before)

    def _check_accepted(self, call: Call, header: FrameHeader, row: Row, before: View) -> None:
        worker, who = before.workers.get(row.worker_id), call.identity
        is_in = worker is not None and worker.active and who is not None
        lives = {(life.worker_id, life.incarnation) for life in (worker, who, row) if life}
        is_holder = is_in and len(lives) == 1 and header.worker_id == row.worker_id
        check("accepted-from-holder", is_holder, call=call, accepted=row, worker=worker)
        open_rounds = before.open_rounds
        leased = before.leased(row.round, row.worker_id)
        right = self._seen.reference.rules.destination(row.round, open_rounds)
        bound = before.terms(row.round).settings["max_staleness"]
        check("stale-is-refused", row.applied - row.round <= bound, accepted=row, bound=bound)
        is_open = row.applied in open_rounds and (row.round, row.applied) == (header.round, right)
        is_leased = sorted(map(span_of, leased)) == sorted(header.ranges)
        told = {"accepted": row, "header": header, "open": open_rounds, "leased": leased}
        check("accepted-in-open-round", is_open and is_leased, **told)
        is_own = all(lease.incarnation == row.incarnation for lease in leased)
        check("accepted-from-holder", is_own, accepted=row, leased=leased)
        base = self._seen.reference.base(row.round)
        check("accepted-base", header.base_digest == base, header=header, published=base)

    def _check_weight(self, row: Row, before: View) -> None:
        rows = sum(map(len, map(span_of, before.leased(row.round, row.worker_id))))
        contained = rows * BLOCK + before.earlier_tokens(row.worker_id, row.first, row.round)
        weight = before.terms(row.round).asked.weight(tokens=contained)
        right = (rows, rows * BLOCK, weight)
        found = (row.rows, row.tokens, row.weight)
        check("weight-by-rule", found == right, recorded=row, rows_tokens_weight=right)

    def answered(self, call: Call, value: Any, after: View) -> None:
        """A message was answered, perhaps with a receipt."""
        if isinstance(value, ContributionRecord):
            self._check_receipt(call, value)
            self.acknowledged(after)
        if isinstance(value, AnnounceReply) and value.receipt:
            assert call.frame is not None
            row = after.contributions.get((call.frame.header.round, call.worker_id))
            is_there = row is not None and row.receipt == value.receipt
            check("receipt-matches", is_there, got=value, recorded=row)
            self._check_receipt(call, row)
            self.acknowledged(after)

    def _check_receipt(self, call: Call, record: ContributionRecord | Row) -> None:
        frame, key = call.frame, (record.round, record.worker_id)
        sent = frame and (frame.sha256, frame.header.round, call.worker_id)
        check("receipt-matches", sent == (record.sha256, *key), sent=sent, got=record)
        first = self._receipts.setdefault(key, (record.sha256, record.receipt))
        is_same = first == (record.sha256, record.receipt)
        check("receipt-matches", is_same, got=record, before=first)

    def acknowledged(self, view: View) -> None:
        """Every receipt ever given is in the ledger."""
        for key, receipt in self._receipts.items():
            row = view.contributions.get(key)
            is_kept = row is not None and (row.sha256, row.receipt) == receipt
            check("acked-is-durable", is_kept, key=key, given=receipt, recorded=row)
