"""Reports and what is made of them."""
