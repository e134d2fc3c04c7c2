"""How contributions become the next version."""
