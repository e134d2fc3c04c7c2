"""Measured questions; one script each."""
