"""Architectures: what differs between dense decoders, as data. A family is a function from config.json to a `ModelConfig`."""
