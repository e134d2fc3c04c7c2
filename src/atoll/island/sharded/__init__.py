"""An island of a sharded run: one process, one rank."""
