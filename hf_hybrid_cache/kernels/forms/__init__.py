"""Forms of quantized numbers in memory: packed blocks of keys and values, panels of weights."""
