"""What a step is: its joint graph, who shares memory in it, what may not run again."""
