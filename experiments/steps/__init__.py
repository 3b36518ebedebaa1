"""Decode steps and prompts, beside transformers."""
