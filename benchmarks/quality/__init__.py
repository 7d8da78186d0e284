"""What weight formats cost in quality: perplexity and the error of logits."""
