"""Selective checkpoints of models that are not compiled."""
