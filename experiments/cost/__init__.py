"""Time and memory of single operations: appending, storing, loading."""
