"""What is measured on a machine with a GPU: `python -m experiments.gpu` runs all of it, the best worth first."""
