"""Plans, written out."""
