"""What must hold after every event, checked against what was said and what SQLite holds."""
