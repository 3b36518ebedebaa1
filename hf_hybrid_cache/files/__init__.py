"""Files of tensors with checksums: of saved caches, and of kept prompts."""
