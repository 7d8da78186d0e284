"""Offline quantisation of checkpoints: `python -m backend.quant`, or `./everbatch quantize`. No engine imports this room."""
