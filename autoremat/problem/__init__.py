"""A graph in its shell, stated for the solver."""
