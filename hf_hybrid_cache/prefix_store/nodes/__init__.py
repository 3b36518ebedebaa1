"""Nodes: what is stored of a run of tokens, as which tensors, and how a cache is filled from them."""
