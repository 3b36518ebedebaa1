"""Runs: keys and values of a layer in one place and form."""
