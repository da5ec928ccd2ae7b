"""How a completion is read, where it ends, and whether its answer is right."""
