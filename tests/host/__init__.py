"""Where values wait."""
