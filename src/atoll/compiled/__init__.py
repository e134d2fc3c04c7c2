"""Loops over tiles that are compiled to machine code, where numba is installed."""
