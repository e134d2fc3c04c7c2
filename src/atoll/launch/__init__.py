"""Putting parts together on this machine: state directories, local processes."""
