"""What the ledger stands for: weights restored, replayed, proven, exported and pruned."""
