"""Steps that Inductor wrote for a GPU that is not here, executed on the CPU."""
