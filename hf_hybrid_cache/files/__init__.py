"""Files of tensors with checksums: of saved caches, and of a prefix store."""
