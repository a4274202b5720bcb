"""What Inductor makes of a plan."""
