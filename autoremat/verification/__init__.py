"""Whether an optimised step is that of eager mode, and where it differs if not."""
