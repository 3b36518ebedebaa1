"""Prompts: what a store is asked for, checked, and the forward passes that it is read in."""
