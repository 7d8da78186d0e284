"""The table of sampling fields: for each its limits, what asks for nothing, whether beams allow it, and its name on each wire.

Checks, neutral values, tensors and docs/sampling.md follow from it. The typed structs (SamplingConfig, and those that read a
wire) are written out; tests/serving/test_sampling_fields.py compares them with this table.

To add a field: a row here, the field in the structs of the wires that are to take it, and what computes it in
backend/sampling. All tiers read the same backend/sampling/slots.py, so each of them honours every field.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

INT31 = (1 << 31) - 1
UINT64 = (1 << 64) - 1

Wire = Literal[
    "tensorrt_llm", "ensemble", "llmapi", "turbomind", "lmdeploy", "json", "openai", "client", "bindings", "llm"
]
WIRES: dict[Wire, str] = {
    "tensorrt_llm": "`tensorrt_llm`",
    "ensemble": "`ensemble`, `tensorrt_llm_bls`",
    "llmapi": "`llmapi`, behind `sampling_param_`",
    "turbomind": "`turbomind`",
    "lmdeploy": "`lmdeploy_model`",
    "json": "`vllm_model`, `everbatch`",
    "openai": "OpenAI's API",
    "client": "Python client",
    "bindings": "TensorRT-LLM's bindings",
    "llm": "`LLM`",
}
_ALL_TENSORS = "ensemble tensorrt_llm"
_NAMED = "json openai client bindings llm"


class SamplingField(NamedTuple):
    """One field of SamplingConfig. `on` lists the wires on which it has its own name, `names` its names on others.

    Several names on one wire are aliases, separated by spaces; the first one counts.
    """

    name: str
    dtype: str  # Triton's type of its tensor; empty for lists and maps
    on: str
    names: dict[Wire, str] = {}
    least: float | None = None  # smallest allowed value; None: not checked by this table
    greatest: float | None = None  # None: the greatest token id, if there is a `least`
    unset: float | None = None  # TensorRT-LLM's clients send this value, or less, for a field that they leave unset
    with_beams: tuple[float, ...] | None = None  # the only values that beams allow; None: they allow all
    asks_for_sampling: bool = False
    other_names: str | None = None  # in other APIs; None: a request parameter of this name is unknown

    @property
    def excludes_zero(self) -> bool:
        return self.unset == 0

    def names_on(self, wire: Wire) -> list[str]:
        """All names on a wire; empty if the wire does not have the field."""
        return [self.name] if wire in self.on.split() else self.names.get(wire, "").split()


# The order is that of the tensors in config.pbtxt.
SAMPLING_FIELDS = (
    SamplingField(
        "top_k", "INT32", f"ensemble llmapi lmdeploy {_NAMED}", {"tensorrt_llm": "runtime_top_k", "turbomind": "runtime_top_k"},
        least=0, greatest=INT31, with_beams=(0, 1), asks_for_sampling=True, other_names="runtime_top_k",
    ),
    SamplingField(
        "top_p", "FP32", f"ensemble llmapi lmdeploy {_NAMED}", {"tensorrt_llm": "runtime_top_p", "turbomind": "runtime_top_p"},
        least=0.0, greatest=1.0, unset=0.0, with_beams=(1.0,), asks_for_sampling=True, other_names="runtime_top_p",
    ),
    SamplingField(
        "top_p_decay", "FP32", "turbomind bindings llm", {"tensorrt_llm": "runtime_top_p_decay"},
        least=0.0, greatest=1.0, unset=0.0,
    ),
    SamplingField(
        "top_p_min", "FP32", "turbomind bindings llm", {"tensorrt_llm": "runtime_top_p_min"},
        least=0.0, greatest=1.0, unset=0.0,
    ),
    SamplingField(
        "top_p_reset_ids", "INT32", "turbomind bindings llm", {"tensorrt_llm": "runtime_top_p_reset_ids"},
        least=0, unset=-1,
    ),
    SamplingField(
        "temperature", "FP32", f"{_ALL_TENSORS} llmapi turbomind lmdeploy {_NAMED}",
        least=0.0, greatest=100.0, with_beams=(1.0,), asks_for_sampling=True, other_names="",
    ),
    SamplingField(
        "repetition_penalty", "FP32", f"{_ALL_TENSORS} turbomind lmdeploy {_NAMED}",
        least=0.01, greatest=100.0, with_beams=(1.0,), other_names="",
    ),
    SamplingField(
        "presence_penalty", "FP32", f"{_ALL_TENSORS} llmapi {_NAMED}",
        least=-100.0, greatest=100.0, with_beams=(0.0,), other_names="",
    ),
    SamplingField(
        "frequency_penalty", "FP32", f"{_ALL_TENSORS} llmapi {_NAMED}",
        least=-100.0, greatest=100.0, with_beams=(0.0,), other_names="",
    ),
    SamplingField(
        "min_tokens", "INT32", _NAMED, {"tensorrt_llm": "min_tokens min_length", "ensemble": "min_tokens min_length"},
        least=0, greatest=INT31, other_names="min_length min_new_tokens",
    ),
    SamplingField(
        "seed", "UINT64", f"llmapi {_NAMED}",
        {"tensorrt_llm": "seed random_seed", "ensemble": "seed random_seed", "turbomind": "random_seed"},
        least=0, greatest=UINT64, other_names="random_seed",
    ),
    SamplingField(
        "num_return_sequences", "INT32", f"{_ALL_TENSORS} bindings",
        {"llmapi": "best_of", "json": "n best_of", "openai": "n best_of", "client": "n", "llm": "n best_of"},
        other_names="n best_of",
    ),
    SamplingField(
        "beam_width", "INT32", f"{_ALL_TENSORS} llmapi client bindings",
        {"json": "use_beam_search", "openai": "use_beam_search", "llm": "use_beam_search"},
        other_names="num_beams use_beam_search",
    ),
    SamplingField("early_stopping", "BOOL", f"{_ALL_TENSORS} json openai bindings llm", other_names=""),
    SamplingField(
        "beam_search_diversity_rate", "FP32", f"{_ALL_TENSORS} bindings llm",
        least=-100, greatest=100, other_names="diversity_penalty",
    ),
    SamplingField(
        "length_penalty", "FP32", f"ensemble {_NAMED}", {"tensorrt_llm": "len_penalty"},
        least=-50, greatest=50, other_names="len_penalty",
    ),
    SamplingField(
        "min_p", "FP32", "json openai bindings llm",
        least=0.0, greatest=1.0, with_beams=(0.0,), asks_for_sampling=True, other_names="",
    ),
    SamplingField(
        "no_repeat_ngram_size", "INT32", "bindings llm",
        least=0, greatest=INT31, with_beams=(0,),
    ),
    SamplingField(
        "logit_bias", "", "json openai",
        {
            "tensorrt_llm": "embedding_bias", "ensemble": "embedding_bias_words embedding_bias_weights", "llm": "embedding_bias"
        },
        with_beams=(), other_names="embedding_bias_words embedding_bias",
    ),
    SamplingField("beam_width_array", "", "bindings llm", with_beams=()),  # refused in this version
)  # fmt: skip


def on_wire(wire: Wire) -> Iterator[tuple[SamplingField, str]]:
    """The fields that a wire has, with each of their names on it."""
    for field in SAMPLING_FIELDS:
        for name in field.names_on(wire):
            yield field, name
