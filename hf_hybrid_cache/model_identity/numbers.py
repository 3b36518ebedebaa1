"""The version of the numbers that the code of this package computes."""

# Raise it when kernels or codecs give other results than before: states that were kept are then read again.
NUMBERS = 1
