"""The command `batch`: many questions about many documents."""
