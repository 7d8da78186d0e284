"""Quantise a GGUF file of bfloat16 weights with llama.cpp's own quantiser. Runs in llama.cpp's environment.

    python -m benchmarks.peers.quantize_gguf BF16.gguf FILE q4_0|q4_k_m|q5_k_m|q6_k|iq4_nl [IMATRIX.npz]

IMATRIX: importance matrix, how much each input counts, by the names of a Hugging Face checkpoint's projections.

llama.cpp chooses the type of each tensor: more bits for the output head and, of Q4_K_M, for some layers; and another type for
rows that are no multiple of 256, which Q4_K needs. `tensor_types` says what it chose.
"""

from __future__ import annotations

import collections
import ctypes
import os
import sys
from pathlib import Path

TYPES = {"q4_0": 2, "q4_k_m": 15, "q5_k_m": 17, "q6_k": 18, "iq4_nl": 25}  # of llama.h's llama_ftype


def quantize(source: Path, file: Path, kind: str, matrix: Path | None = None) -> None:
    """SystemExit with one sentence when llama.cpp refuses."""
    import llama_cpp

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.nthread = len(os.sched_getaffinity(0))
    parameters.ftype = TYPES[kind]
    if matrix is not None:
        import numpy

        from benchmarks.peers.write_gguf import gguf_name

        with numpy.load(matrix) as content:
            named = [(gguf_name(f"{key}.weight").encode(), numpy.float32(content[key])) for key in content]
        pointer = ctypes.POINTER(ctypes.c_float)
        entries = [(name, values.ctypes.data_as(pointer), len(values)) for name, values in named]
        parameters.imatrix = (llama_cpp.llama_model_imatrix_data * (len(entries) + 1))(*entries)  # zeros end it
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
    source, file, kind, *matrix = sys.argv[1:]
    quantize(Path(source), Path(file), kind, *map(Path, matrix))


if __name__ == "__main__":
    main()
