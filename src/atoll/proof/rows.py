"""Every row once: leases against each other, the balance of epochs, and the queues."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from atoll.ledger.ledger import Ledger
from atoll.ledger.records import LeaseRecord, LeaseState, RoundRecord
from atoll.proof import balance
from atoll.proof.report import AuditReport


def check_rows(
    report: AuditReport, leases: Sequence[LeaseRecord], rounds: Sequence[RoundRecord]
) -> None:
    """Every row ever issued is in exactly one lease: done, leased, open again or given up."""
    current = [lease for lease in leases if lease.state is not LeaseState.TAKEN]
    current.sort(key=lambda lease: (lease.dataset_id, lease.start, lease.stop))
    reached = sum(
        _check_sequence(report, mine, rounds)
        for _, mine in groupby(current, key=lambda lease: lease.dataset_id)
    )
    cursor = rounds[-1].cursor if rounds else 0
    if reached < cursor:
        _report_lost(report, rounds, reached, cursor)
    if reached > cursor:
        said = f"rows up to {reached} are leased, the newest round's cursor is {cursor}"
        report.add(rounds[-1].round, "cursor", said)


def _check_sequence(
    report: AuditReport, leases: Iterable[LeaseRecord], rounds: Sequence[RoundRecord]
) -> int:
    """Finds rows of one dataset that are in no lease or in two; returns where its leases end."""
    reached, before = 0, None
    for lease in leases:
        if lease.start > reached:
            _report_lost(report, rounds, reached, lease.start)
        if before is not None and lease.start < reached:
            report.add(
                max(lease.round, before.round),
                "row twice",
                f"rows [{before.start}, {before.stop}) of round {before.round} and "
                f"[{lease.start}, {lease.stop}) of round {lease.round} overlap",
            )
        if lease.stop > reached:
            reached, before = lease.stop, lease
    return reached


def check_work(
    report: AuditReport, ledger: Ledger, leases: Sequence[LeaseRecord], *, newest: int
) -> None:
    """The balance of rows, and queues that are damaged or say something else than the leases."""
    with ledger.reading() as t:
        datasets, queues = t.datasets.all(), t.queues.all()
    report.balance = balance.balance(leases, datasets)
    for epoch in report.balance:
        if not epoch.holds:
            report.add(
                newest,
                f"row balance of {epoch.dataset_id} epoch {epoch.epoch}",
                f"{epoch.done_twice} rows are done twice; {epoch.missing} are missing, of "
                f"which {epoch.open} are open and {epoch.given_up} given up",
            )
    for name, wrong in balance.check_queues(queues, leases, datasets):
        report.add(newest, f"queue {name}", wrong)


def _report_lost(report: AuditReport, rounds: Sequence[RoundRecord], start: int, stop: int) -> None:
    planned = next((r.round for r in rounds if r.cursor > start), rounds[-1].round)
    report.add(planned, "row lost", f"rows [{start}, {stop}) are in no lease of any round")
