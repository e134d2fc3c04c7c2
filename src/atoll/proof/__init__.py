"""What shows that a run is what its ledger says: audit, balance, export, and what may be pruned."""
