"""Decode steps and prompts: ours, beside transformers."""
