"""Chooses the sequences of the next step and their tokens: capacity, then micro-batch, then one commit. Pure."""
