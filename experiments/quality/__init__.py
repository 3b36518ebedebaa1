"""The loss of quality by quantization."""
