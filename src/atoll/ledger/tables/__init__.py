"""The tables of a ledger, and what is done with the rows of each."""
