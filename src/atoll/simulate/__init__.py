"""A whole run in one process: the real coordinator and islands on a virtual clock."""
