"""Per-slot sampling parameters and the Sampler. The tensor mathematics is in kernels/sampling.py."""
