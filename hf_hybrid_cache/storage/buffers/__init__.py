"""Memory that grows in place: tokens on a device or in host memory, blocks and packed blocks in host memory."""
