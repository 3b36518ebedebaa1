"""Measurements that anyone can repeat: `python -m experiments.NAME`. They use only the public API."""
