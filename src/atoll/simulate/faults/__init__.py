"""A run under faults, one seed at a time: the real coordinator on a virtual clock, checked."""
