"""Two results of a benchmark, figure by figure: `./everbatch bench compare` (see __main__.py and docs/bench.md)."""
