"""Attention to some pages of a context: the index of keys, top-p page selection, the residual estimate."""
