"""This server beside other servers over the network: `./everbatch bench served` (see __main__.py and docs/bench.md)."""
