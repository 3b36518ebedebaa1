"""The parts that all kernels use: compilation, threads, vector instructions."""
