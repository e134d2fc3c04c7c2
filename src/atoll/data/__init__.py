"""Rows of training data: what they are, their order, and who trains which."""
