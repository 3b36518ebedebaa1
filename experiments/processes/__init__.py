"""Several processes and threads."""
