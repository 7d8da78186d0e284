"""Quantise a GGUF file of bfloat16 weights with llama.cpp's own quantiser. Runs in llama.cpp's environment.

    python -m benchmarks.peers.quantize_gguf BF16.gguf FILE q4_0|q4_k_m|iq4_nl

llama.cpp chooses the type of each tensor: more bits for the output head and, of Q4_K_M, for some layers; and another type for
rows that are no multiple of 256, which Q4_K needs. `tensor_types` says what it chose.
"""

from __future__ import annotations

import collections
import ctypes
import os
import sys
from pathlib import Path

TYPES = {"q4_0": 2, "q4_k_m": 15, "iq4_nl": 25}  # of llama.h's llama_ftype


def quantize(source: Path, file: Path, kind: str) -> None:
    """SystemExit with one sentence when llama.cpp refuses."""
    import llama_cpp

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.nthread = len(os.sched_getaffinity(0))
    parameters.ftype = TYPES[kind]
    status = llama_cpp.llama_model_quantize(str(source).encode(), str(file).encode(), ctypes.byref(parameters))
    if status != 0:
        raise SystemExit(f"llama_model_quantize answered {status} to {source.name} as {kind}")


def tensor_types(file: Path) -> str:
    """What the matrices of a file are held as, by how many weights: `Q4_0 98 %, Q6_K 2 % of the weights, 4.56 bits each`."""
    import gguf

    weights: collections.Counter[str] = collections.Counter()
    num_bytes = 0
    for tensor in gguf.GGUFReader(file).tensors:
        if len(tensor.shape) > 1:
            weights[tensor.tensor_type.name] += int(tensor.n_elements)
            num_bytes += int(tensor.n_bytes)
    return shares(weights, num_bytes)


def shares(weights: collections.Counter[str], num_bytes: int) -> str:
    """`weights`: their number by type; `num_bytes`: what all of them take."""
    total = weights.total()
    each = ", ".join(f"{name} {100 * count / total:.0f} %" for name, count in weights.most_common())
    return f"{each} of the weights, {8 * num_bytes / total:.2f} bits each"


def main() -> None:
    source, file, kind = sys.argv[1:]
    quantize(Path(source), Path(file), kind)


if __name__ == "__main__":
    main()
