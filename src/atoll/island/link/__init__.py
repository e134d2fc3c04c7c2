"""How an island speaks with its coordinator."""
