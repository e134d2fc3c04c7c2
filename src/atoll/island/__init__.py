"""An island: trains on its own most of the time and keeps to the run's one model."""
