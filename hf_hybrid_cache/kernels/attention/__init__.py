"""Attention to blocks in full precision and to quantized ones, by few queries and by many."""
