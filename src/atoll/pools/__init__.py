"""Groups of ranks that compute parts of one loss, whose gradients cross ranks as partial sums."""
