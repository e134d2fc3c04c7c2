"""How fp32 values become bytes of an exactly known size, and back."""
