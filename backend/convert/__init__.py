"""Makes Hugging Face checkpoints of Meta's files and of pickled ones, and Meta's files of a checkpoint.

Offline: nobody imports it.
"""
