"""Compiles, fallbacks and forms of a call."""
