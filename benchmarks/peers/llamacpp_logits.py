"""Logits of token rows by llama.cpp or ik_llama.cpp itself. Runs in its environment.

python -m benchmarks.peers.llamacpp_logits MODEL.gguf ROWS.npy LOGITS.npy THREADS llamacpp|ik_llamacpp

ROWS [rows, length] integers, each a text of its own -> LOGITS [rows, length, vocab] float32. Prints what the weights are held as.
"""

from __future__ import annotations

import sys
from importlib import import_module

import numpy

from benchmarks.peers.protocol import Load

CLASSES = {"llamacpp": "LlamaCpp", "ik_llamacpp": "IkLlamaCpp"}


def main() -> None:
    model, rows_file, logits_file, threads, name = sys.argv[1:]
    rows = numpy.load(rows_file)
    load = Load(model, "", "", int(threads), 1, rows.shape[1], 0)
    engine = getattr(import_module(f"benchmarks.peers.run_{name}"), CLASSES[name])(load)
    numpy.save(logits_file, numpy.stack([engine.logits(row) for row in rows.tolist()]))
    print(engine.note)


if __name__ == "__main__":
    main()
