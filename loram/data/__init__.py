"""From files to packed rows of tokens with a loss mask."""
