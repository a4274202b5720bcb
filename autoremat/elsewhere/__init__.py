"""A device that is not here: what its machine would trace, and the code that it would run."""
