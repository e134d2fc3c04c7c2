"""The processes of one island: what the leader learns, and one gradient from all."""
