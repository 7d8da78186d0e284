"""Text before and after the engine: tokenizer, chat template, detokenizer, stop strings. Imports no torch."""
