"""Segments that are streamed to the device, the slots they take turns in, and the copies between."""
