"""Contents: the layers of a cache, their checkpoints, and the memory that they take."""
