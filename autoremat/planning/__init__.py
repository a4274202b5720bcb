"""Which plan a graph gets, and how the graphs of a step share one budget."""
