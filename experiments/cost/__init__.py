"""What single parts cost: time and memory of appending, storing, loading."""
