"""Who takes part: registration, signs of life, generations, the operator's commands."""
