"""Logits of token rows by OpenVINO itself. Runs in its environment.

python -m benchmarks.peers.openvino_logits MODEL_DIR ROWS.npy LOGITS.npy THREADS SETTING

ROWS [rows, length] integers, each a text of its own -> LOGITS [rows, length, vocab] float32. SETTING is one of the runner's.
The model runs as it was exported, without the paged attention of the runner's pipeline. Prints what the weights are held as.
"""

from __future__ import annotations

import collections
import sys
from pathlib import Path
from typing import Any

import numpy
import openvino

from benchmarks.peers.quantize_gguf import shares
from benchmarks.peers.run_openvino import properties_of

WEIGHT_TYPES = ("u4", "i4", "u8", "i8")


def held_as(model: Any, file: Path) -> str:
    """The types of the constants that are quantised weights (or their few zero points); bytes are those of the whole file."""
    weights: collections.Counter[str] = collections.Counter()
    for node in model.get_ops():
        if node.get_type_name() == "Constant" and (kind := node.get_element_type().get_type_name()) in WEIGHT_TYPES:
            weights[kind] += int(numpy.prod(node.get_output_shape(0)))
    return shares(weights, file.stat().st_size)


def main() -> None:
    directory, rows_file, logits_file, threads, setting = sys.argv[1:]
    rows = numpy.load(rows_file)
    core = openvino.Core()
    model = core.read_model(Path(directory, "openvino_model.xml"))
    properties = {"INFERENCE_NUM_THREADS": int(threads), **properties_of(setting)}
    request = core.compile_model(model, "CPU", properties).create_infer_request()
    found = []
    for row in rows.astype(numpy.int64):
        request.reset_state()
        inputs = {
            "input_ids": row[None],
            "attention_mask": numpy.ones((1, len(row)), numpy.int64),
            "position_ids": numpy.arange(len(row))[None],
            "beam_idx": numpy.zeros(1, numpy.int32),
        }
        request.infer(inputs)
        found.append(request.get_tensor("logits").data[0].astype(numpy.float32))
    numpy.save(logits_file, numpy.stack(found))
    print(held_as(model, Path(directory, "openvino_model.bin")))


if __name__ == "__main__":
    main()
