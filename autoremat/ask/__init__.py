"""What the user asked for, as values."""
