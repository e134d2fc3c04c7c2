"""Groups of ranks that each compute a part of the loss, and the check of what they sum."""
