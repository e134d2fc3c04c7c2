"""The coordinator: the run's only authority."""
