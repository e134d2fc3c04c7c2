"""Plans with one object replaced, each with the table of gradients that it must give."""
