"""How much room things take."""
