"""A sharded run at the coordinator: groups of ranks, what they save, and checkpoints."""
