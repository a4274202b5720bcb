"""Where values wait that a plan sends away: on a CPU, a file mapped into memory."""
