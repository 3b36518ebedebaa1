"""Checks: whether forward passes and prompts fit the cache, and why steps are slow."""
