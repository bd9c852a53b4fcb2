"""How good a model is on held-out text."""
