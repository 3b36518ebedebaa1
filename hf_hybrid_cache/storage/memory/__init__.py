"""Memory of the host: its limits, address space, page-locking, and how memory grows."""
