"""What coordinator and islands say to each other; no tensors, no transport."""
