"""Which units go, and the cut itself."""
