"""DiLoCo (arXiv 2311.08105): islands train on their own and hand in how far they moved."""
