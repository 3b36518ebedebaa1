"""Running a command in several processes, which torchrun starts."""
