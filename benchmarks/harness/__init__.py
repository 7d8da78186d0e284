"""What the benchmarks share: requests, streams with their percentiles, measuring in turns, results, tables and pictures."""
