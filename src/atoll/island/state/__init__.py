"""What an island holds: its weights, and what it keeps on disk to go on after a restart."""
