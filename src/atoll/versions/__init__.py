"""The run's weights as a function of initial weights and ledger: computed live, and again."""
