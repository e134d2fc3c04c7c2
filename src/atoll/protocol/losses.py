"""What a told loss may be: losses are shown and compared, never folded, and still not believed."""

from atoll.errors import ContributionError

MAX_MEAN_LOSS = 1e6  # nats a token; a cross-entropy of so many is no model's


def check(loss_sum: float, tokens: int, *, of: str) -> None:
    """ContributionError unless a sum over `tokens` is finite, not negative and within the bound."""
    if not 0.0 <= loss_sum <= MAX_MEAN_LOSS * tokens:
        raise ContributionError(
            f"loss_sum={loss_sum!r} of {of} over tokens={tokens} must be from 0 to "
            f"{MAX_MEAN_LOSS:g} for each token; it is left out, look at the island's model and loss"
        )
