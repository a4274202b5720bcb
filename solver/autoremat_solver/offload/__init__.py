"""Which values wait on the host, and when they come back, with recompute as the alternative."""
