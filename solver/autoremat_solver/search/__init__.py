"""How the methods are put together, and the search over single reruns."""
