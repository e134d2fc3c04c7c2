"""One bit a value, with a scale for every block."""
