"""Sharded runs in one process: ranks are fibers, and what lies between them is memory."""
