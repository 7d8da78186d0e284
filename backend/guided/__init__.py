"""Guided decoding: grammars that allow or forbid each next token of an output."""
