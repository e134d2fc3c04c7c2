"""Everything that knows a SQLite file: opening, log, seals, and taking a damaged one apart."""
