"""Models with experts in host memory."""
