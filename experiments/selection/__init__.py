"""Attention to selected pages: what it costs, and what it gains."""
