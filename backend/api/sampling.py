"""Sampling controls: SamplingConfig, and the table of its fields: limits, what asks for nothing, beams, and names on each wire.

Checks, neutral values, tensors and docs/sampling.md follow from it, and so do the structs of the JSON wires and of the OpenAI
endpoint, and the cases of tests, for a field of PLAIN. The other fields are written out in the structs of the wires that take
them; tests/serving/test_sampling_fields.py compares them with this table.

To add a field: a row and a field of SamplingConfig here, and what computes it in backend/sampling. All tiers read the same
backend/sampling/slots.py, so each of them honours every field.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct

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
    plain: float | None = (
        None  # a number that changes the output: on JSON wires the field is an optional number as it is here
    )

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
        least=0.01, greatest=100.0, with_beams=(1.0,), other_names="", plain=1.5,
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
        least=0.0, greatest=1.0, with_beams=(0.0,), asks_for_sampling=True, other_names="", plain=0.5,
    ),
    SamplingField(
        "top_n_sigma", "FP32", "json openai",
        least=-1.0, greatest=100.0, with_beams=(-1.0, 0.0), asks_for_sampling=True, other_names="", plain=1.0,
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


PLAIN = tuple(field for field in SAMPLING_FIELDS if field.plain is not None)
ASKING = tuple(field.name for field in SAMPLING_FIELDS if field.asks_for_sampling)


class SamplingConfig(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Sampling controls of one request.

    Decoding is greedy unless at least one of `temperature`, `top_k`, `top_p`, `min_p`, `top_n_sigma` asks for sampling;
    `temperature` 0 and `top_k` 1 are greedy too. Order of application: bad words, repeated n-grams, logit bias and min_tokens on
    the logits, then top-n-sigma; repetition, presence and frequency penalties; temperature; top-k, top-p, min-p on the
    distribution; one uniform number per token, drawn from (seed, number of tokens sampled so far), so that neither batch order
    nor eviction changes the choice.

    `num_return_sequences` n without beams: n sequences, each with a random stream of its own, derived from (seed, index); that
    of the first is the seed's own.

    `beam_width` k > 1: the k best hypotheses by the sum of their log-probabilities are kept from token to token, and the n best
    are returned (n = `num_return_sequences`, or k). Ended hypotheses are ranked by sum / length ** length_penalty, length in
    output tokens. Early stopping 1 ends the search when k hypotheses have ended; 0 when the best one that goes on could not
    come before the last of them if it ended now; any other number when it could not even at its longest (as Hugging Face's
    True, False and "never"). For the choice only, the diversity rate times its rank among those of its hypothesis (0 = most
    likely) is added to the score of a candidate: below 0 it makes hypotheses of one origin rarer. Beams are not sampled.
    """

    beam_width: int = 1
    num_return_sequences: int | None = None
    temperature: float | None = None  # >= 0
    top_k: int | None = None  # >= 0; 0 = off
    top_p: float | None = None  # (0, 1]
    min_p: float | None = None  # [0, 1]
    seed: int | None = None  # uint64; unset = 0, as in TensorRT-LLM
    repetition_penalty: float | None = None  # > 0; counts tokens of prompt and output
    presence_penalty: float | None = None  # counts tokens of the output only
    frequency_penalty: float | None = None  # counts tokens of the output only
    min_tokens: int | None = None  # end ids and stop words are held back until then
    logit_bias: dict[int, float] | None = None  # token id -> added to its logit
    length_penalty: float | None = None  # beams only; unset = 0
    early_stopping: int | None = None  # beams only: 1 (as when unset), 0, or another number
    beam_search_diversity_rate: float | None = None  # beams only; unset = 0
    no_repeat_ngram_size: int | None = None  # >= 0; 0 = off; no run of so many tokens occurs twice in prompt and output
    top_p_decay: float | None = None  # (0, 1]; after each output token top_p is multiplied by it ...
    top_p_min: float | None = None  # (0, 1]; ... and falls no lower than this; unset = 1e-6
    top_p_reset_ids: int | None = None  # a token id; behind it top_p is what it was at first
    beam_width_array: list[int] | None = None  # a width for each step; refused in this version
    top_n_sigma: float | None = (
        None  # standard deviations below the greatest logit that a token may lie; 0 and -1 = off
    )

    @property
    def is_greedy(self) -> bool:
        return all(getattr(self, name) is None for name in ASKING) or self.temperature == 0 or self.top_k == 1

    @property
    def cuts_distribution(self) -> bool:
        """True if only some of the tokens can be drawn."""
        return any(getattr(self, name) for name in ASKING if name != "temperature")

    @property
    def decays_top_p(self) -> bool:
        return any(value is not None for value in (self.top_p_decay, self.top_p_min, self.top_p_reset_ids))

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty not in (None, 1.0)
            or self.presence_penalty not in (None, 0.0)
            or self.frequency_penalty not in (None, 0.0)
        )


_ZERO_IS_UNSET = frozenset(field.name for field in SAMPLING_FIELDS if field.excludes_zero)
_UNSET = {field.name: field.unset for field in SAMPLING_FIELDS if field.unset is not None}


def tensorrt_llm_sampling(**fields: Any) -> SamplingConfig:
    """The rule of TensorRT-LLM and TurboMind: without top-k, top-p and min-p (0 is none) decoding is greedy, whatever the
    temperature. Nothing is checked here, and the temperature stays, so that one out of its limits is refused as everywhere.
    """
    given: dict[str, Any] = {name: value for name, value in fields.items() if name not in _ZERO_IS_UNSET or value != 0}
    config = SamplingConfig(**given)
    if config.is_greedy or config.cuts_distribution:
        return config
    return msgspec.structs.replace(config, top_k=1)


def without_unset(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields without those whose value TensorRT-LLM's clients send for "unset", or a smaller one."""
    return {name: value for name, value in fields.items() if name not in _UNSET or value > _UNSET[name]}
