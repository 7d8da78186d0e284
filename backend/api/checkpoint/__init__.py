"""The files of a checkpoint, read with limits before any tensor is loaded."""
