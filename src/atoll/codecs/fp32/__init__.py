"""Values as they are, four bytes each."""
