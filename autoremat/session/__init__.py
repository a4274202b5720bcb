"""One model's compiles: what is remembered between its graphs and steps."""
