"""Measurements with several processes and threads."""
