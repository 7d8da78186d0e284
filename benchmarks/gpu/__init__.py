"""Every kernel and the engine on a GPU, beside what bounds them: `python -m benchmarks.gpu`."""
