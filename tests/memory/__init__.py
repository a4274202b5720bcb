"""Measured and resident bytes."""
