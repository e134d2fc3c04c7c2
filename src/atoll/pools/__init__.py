"""Parts of a loss on groups of ranks of different size, joined by partial sums."""
