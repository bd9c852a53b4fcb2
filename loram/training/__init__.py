"""One loop for align and train."""
