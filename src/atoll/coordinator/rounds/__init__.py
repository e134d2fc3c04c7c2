"""The life of a round: who trains what, when it closes, and the weights that follow."""
