"""Immutable byte strings named by their sha256: in memory, in a directory, in an S3 bucket."""
