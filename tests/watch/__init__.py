"""What a step holds beside its graphs."""
