"""torch's own data parallelism, made to carry plain sums, and a probe that it does."""
