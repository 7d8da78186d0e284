"""What the kernels are made of and are no kernels themselves: formats, tiles, transfers, Triton where it can be used."""
