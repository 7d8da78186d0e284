"""Runner of OpenVINO GenAI: its continuous-batching pipeline, driven step by step. Prefix caching is off."""

from __future__ import annotations

import itertools
from typing import Any

from benchmarks.peers.protocol import Load, Stopwatch, Timing, serve

# Properties of the CPU plug-in: computing in bf16, or in f32 with activations quantised dynamically in groups.
# Which one is faster with int8 or int4 weights depends on model and concurrency.
PROPERTIES: dict[str, dict[str, Any]] = {
    "bf16": {"INFERENCE_PRECISION_HINT": "bf16"},
    "f32+dq32": {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 32},
    "f32+dq128": {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 128},
}
# Settings of int4 name the kind of weights first: groups of 128 with a zero point, as it is by default, or without.
SETTINGS_OF = {
    "bf16": ("bf16",),
    "int8": ("bf16", "f32+dq32"),
    "int4": ("asym:bf16", "asym:f32+dq32", "sym:f32+dq32", "sym:f32+dq128"),
}


def properties_of(setting: str) -> dict[str, Any]:
    """The properties of OpenVINO that a setting's name ends with."""
    return PROPERTIES[setting.rpartition(":")[2]]


class OpenVino:
    note = ""

    def __init__(self, load: Load) -> None:
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = load.kv_gib
        scheduler.max_num_seqs = max(256, load.max_concurrency)
        scheduler.max_num_batched_tokens = 8192
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": load.threads, **properties_of(load.setting)}
        properties["ENABLE_MMAP"] = (
            False  # pages of a file may be dropped while it is paused, and are then read from the disk
        )
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(load.model, scheduler, "CPU", properties)
        self._ids = itertools.count()

    def measure(self, prompts: list[list[int]], new: int) -> Timing:
        import numpy
        import openvino
        import openvino_genai

        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new
        config.ignore_eos = True
        config.do_sample = False
        tensors = [openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in prompts]
        watch = Stopwatch(len(prompts))
        handles = [self._pipeline.add_request(next(self._ids), tensor, config) for tensor in tensors]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            if not watch.all_started:  # later tokens stay in the handles until the end, so as not to slow the steps
                _read(handles, watch)
        _read(handles, watch)
        return watch.timing(new)


def _read(handles: list[Any], watch: Stopwatch) -> None:
    for index, handle in enumerate(handles):
        while handle.can_read():
            watch.add(index, sum(len(output.generated_ids) for output in handle.read().values()))


if __name__ == "__main__":
    serve(OpenVino, ["openvino", "openvino-genai"])
