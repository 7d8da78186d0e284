"""The Sampler and its per-slot parameters. Its arithmetic on tensors is in kernels/sampling.py."""
