"""The upper half of fp32, two bytes a value."""
