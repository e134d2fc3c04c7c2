"""Partial sums, the canonical fold and the params digest."""
