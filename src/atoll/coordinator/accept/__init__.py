"""How a contribution gets in: what its header must say, its body, its receipt."""
