"""A plan, written out: forward and backward with recompute nodes."""
