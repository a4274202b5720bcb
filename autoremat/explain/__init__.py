"""What was planned, and why: the report of a graph."""
