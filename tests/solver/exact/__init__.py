"""The best plan of a small problem, by exhausting what may be."""
