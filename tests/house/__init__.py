"""The layout, the pages, and torch's private names."""
