"""Logits of token rows by llama.cpp or ik_llama.cpp itself. Runs in its environment.

python -m benchmarks.peers.llamacpp_logits MODEL.gguf ROWS.npy LOGITS.npy --threads N --engine llamacpp|ik_llamacpp

ROWS [rows, length] integers, each a text of its own -> LOGITS [rows, length, vocab] float32. Prints what the weights are held as.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

import numpy

from benchmarks.peers.protocol import Load

CLASSES = {"llamacpp": "LlamaCpp", "ik_llamacpp": "IkLlamaCpp"}


def main() -> None:
    parser = argparse.ArgumentParser(description="Logits of token rows by llama.cpp.")
    parser.add_argument("model", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("logits", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--engine", choices=list(CLASSES), default="llamacpp")
    arguments = parser.parse_args()
    rows = numpy.load(arguments.rows)
    load = Load(str(arguments.model), "", "", arguments.threads, 1, rows.shape[1], 0)
    engine = getattr(import_module(f"benchmarks.peers.run_{arguments.engine}"), CLASSES[arguments.engine])(load)
    numpy.save(arguments.logits, numpy.stack([engine.logits(row) for row in rows.tolist()]))
    print(engine.note)


if __name__ == "__main__":
    main()
