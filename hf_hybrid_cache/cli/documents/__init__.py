"""The documents of a prompt: reading them, and how many tokens of each the prompt keeps."""
