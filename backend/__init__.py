"""Everbatch: a persistent batch over a KV cache that behaves like unlimited memory. Contract: README.md beside this file."""

__version__ = "0.1.0"
