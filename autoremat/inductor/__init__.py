"""What the compiler makes of a plan: the code that it generates, and the peak in it."""
