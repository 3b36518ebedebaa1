"""The parts of `experiments.context_sweep`."""
