"""Remains of the format before, for `prefix_store.nodes`, which go with it."""
