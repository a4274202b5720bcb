"""The choice of a plan, and how graphs share a budget."""
