"""The command `plan`: what fits, and how fast it is."""
