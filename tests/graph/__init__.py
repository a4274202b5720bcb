"""Joint graphs, storages, constraints and draws."""
