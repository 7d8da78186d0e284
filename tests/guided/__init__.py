"""Guided decoding: grammars, the compiler, and outputs judged by other parsers."""
