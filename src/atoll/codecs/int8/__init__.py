"""One byte a value and a scale a block."""
