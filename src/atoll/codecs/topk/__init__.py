"""The largest 64 of every 4096 values, in 82 bytes."""
