"""The solver, without torch."""
