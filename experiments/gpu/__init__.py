"""Measurements of a machine with a GPU: `python -m experiments.gpu` runs all of them, the most valuable first."""
