"""Held-out losses from the partial sums in the ledger."""

from atoll.ledger.tables.transaction import Transaction


def held_out_losses(t: Transaction, *, first: int = 0) -> dict[int, float]:
    """Mean held-out loss by version from `first` on, over the tokens really evaluated."""
    sums: dict[int, tuple[float, int]] = {}
    for report in t.evaluations.all(first=first):  # in worker_id order: same bits every time
        loss, tokens = sums.get(report.version, (0.0, 0))
        sums[report.version] = (loss + report.loss_sum, tokens + report.tokens)
    return {version: loss / tokens for version, (loss, tokens) in sums.items()}
