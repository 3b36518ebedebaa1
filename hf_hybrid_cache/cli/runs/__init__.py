"""One run of `generate`: prompt, sampling, times, and why it ended."""
