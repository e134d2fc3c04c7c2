"""Everything that knows a PostgreSQL server: opening, and which process may write."""
