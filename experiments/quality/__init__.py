"""What few bits cost in quality."""
