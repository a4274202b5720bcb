"""Where values wait that a plan sends away: of a CPU files, of a GPU the memory of its host."""
