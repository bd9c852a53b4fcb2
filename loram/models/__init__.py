"""What a model is made of, which of it can be cut, and how a cut model is loaded."""
