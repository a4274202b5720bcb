"""Times and workspaces of operations."""
