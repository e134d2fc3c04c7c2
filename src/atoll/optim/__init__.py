"""Outer optimizers, tile by tile, out of kernels that round once."""
