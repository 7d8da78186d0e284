"""Measurements, each a module run by `./everbatch bench NAME`. Results go to benchmarks/results/; speed is told as ratios of
one run, never as an absolute time.
"""
