"""A problem as numbers: what every method works on."""
