"""Who runs in the next step, and how many tokens of each: capacity, then micro-batch, then one commit. Pure."""
