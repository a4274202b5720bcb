"""What a step really holds beside its planned graphs, seen as it runs."""
