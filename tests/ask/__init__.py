"""What the user may ask for."""
