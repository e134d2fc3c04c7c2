"""An island's side of a run by pull: its signing key, its bucket, its own gather of versions."""
