"""The same step as in eager mode."""
