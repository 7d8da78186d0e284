"""Model families and their checkpoints."""
