"""The command `generate`: one answer, or a comparison of caches."""
