"""The integer program, its rows, and the library that solves it."""
