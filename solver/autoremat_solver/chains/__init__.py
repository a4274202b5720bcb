"""Blocks of a graph and dynamic programs over them: recompute on several levels."""
