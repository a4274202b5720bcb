"""Ours beside what users have."""
