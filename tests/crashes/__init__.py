"""Engines that die under requests: what clients get then, beside what they get undisturbed."""
