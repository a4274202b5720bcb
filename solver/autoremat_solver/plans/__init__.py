"""Plans from sets of saved values, the best of them, and simple ways to some."""
