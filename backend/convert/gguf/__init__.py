"""Writes GGUF files. Nothing here uses the tables by which such files are read, so that reading and writing test each other."""
