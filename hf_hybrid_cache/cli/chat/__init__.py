"""The command `chat`: a conversation that keeps its cache."""
