"""Atoll trains one model on machines that share only an ordinary network."""

__version__ = "0.1.0"
