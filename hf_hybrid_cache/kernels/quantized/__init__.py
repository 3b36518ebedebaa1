"""Quantized blocks: their layout, quantization, and products with their integers."""
