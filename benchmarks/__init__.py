"""Measurements, each a module run by `./everbatch bench NAME`. Results go to benchmarks/results/. Performance is told as ratios of one run."""
