"""The command `kept`: the prompts and conversations in a folder."""
