"""Generated from transfer.proto by `make proto`; never edited by hand."""
