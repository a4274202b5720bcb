"""Which batch fits a budget, and which is fastest: found without a step being run."""
