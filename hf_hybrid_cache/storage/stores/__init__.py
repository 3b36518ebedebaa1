"""Stores: keys and values of one layer in segments, and the layout that says which tokens are where."""
