"""Half a byte a value, with a scale for every block."""
