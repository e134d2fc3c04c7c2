"""Contributions pulled from buckets, through the ordinary accept path."""
