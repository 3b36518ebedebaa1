"""The cost and the gain of attention to selected pages."""
