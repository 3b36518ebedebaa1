"""Products with weights in host memory, quantized or not, and with those of chosen experts."""
