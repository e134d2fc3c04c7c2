"""Held-out losses from the partial sums in the ledger."""

from atoll.ledger.base import Ledger


def held_out_losses(ledger: Ledger, *, first: int = 0) -> dict[int, float]:
    """Mean held-out loss by version from `first` on, over the tokens really evaluated."""
    sums: dict[int, tuple[float, int]] = {}
    for report in ledger.evaluations(first=first):  # in worker_id order: same bits every time
        loss, tokens = sums.get(report.version, (0.0, 0))
        sums[report.version] = (loss + report.loss_sum, tokens + report.tokens)
    return {version: loss / tokens for version, (loss, tokens) in sums.items()}
