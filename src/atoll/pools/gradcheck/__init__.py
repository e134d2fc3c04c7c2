"""The gradients of ranks against those of one process, and the names of what differs."""
