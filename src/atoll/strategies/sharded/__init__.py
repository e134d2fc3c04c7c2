"""Strategy "sharded": one model cut over ranks that exchange at every step."""
