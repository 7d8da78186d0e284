"""Makes Hugging Face checkpoints of Meta's files and of pickled ones, and Meta's files or a GGUF file of a checkpoint.

It is a command of its own, which no other room imports.
"""
