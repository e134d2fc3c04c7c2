"""What people's tools ask of a coordinator: settings, status, control, a copy of the ledger."""
