"""Text at the edges: tokenizer, chat template, detokenizer, stop strings. No torch: the Triton stub imports this."""
