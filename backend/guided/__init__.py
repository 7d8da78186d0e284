"""Guided decoding: grammars that say, token by token, what an output may go on with."""
