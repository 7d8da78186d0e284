"""Parts that several kernels share: formats, tiles, transfers between host and device, and the import of Triton."""
