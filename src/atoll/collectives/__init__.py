"""Collectives between the ranks of a group: SUM, in one order, over any transport."""
