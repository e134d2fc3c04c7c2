"""Sharded training: every rank holds a part of the model, and gathers the rest when it needs it."""
