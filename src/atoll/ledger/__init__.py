"""The durable, ordered record of one run."""
