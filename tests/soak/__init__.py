"""A server under everything at once for an hour: `python -m tests.soak`."""
