"""A decode step of a model in one call."""
