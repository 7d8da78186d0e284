"""Sampling controls, and the outputs that a request asks for. Unset fields read as None, as in TensorRT-LLM's bindings.

docs/sampling.md lists what fields mean that a client leaves out, by the rule of each protocol.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

from backend.api.sampling_fields import SAMPLING_FIELDS


class SamplingConfig(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Sampling controls of one request.

    Decoding is greedy unless at least one of `temperature`, `top_k`, `top_p`, `min_p` asks for sampling; `temperature` 0 and
    `top_k` 1 are greedy too. Order of application: bad words, repeated n-grams, logit bias and min_tokens on the logits;
    repetition, presence and frequency penalties; temperature; top-k, top-p, min-p on the distribution; one uniform number per
    token, drawn from (seed, number of tokens sampled so far), so that neither batch order nor eviction changes the choice.

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

    @property
    def is_greedy(self) -> bool:
        asked = (self.temperature, self.top_k, self.top_p, self.min_p)
        return all(value is None for value in asked) or self.temperature == 0 or self.top_k == 1

    @property
    def cuts_distribution(self) -> bool:
        """True if only some of the tokens can be drawn."""
        return bool(self.top_k or self.top_p or self.min_p)

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


HiddenRows = Literal["last", "all"]


class AdditionalOutput(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A tensor of the model that comes back with the tokens."""

    name: str  # one of model.additional_outputs
    gather_context: bool = False  # for the prompt's positions too


class OutputConfig(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Outputs of a Result; everything not asked for is None."""

    return_log_probs: bool = False  # log-probability of each output token under the model's own distribution
    top_log_probs: int = 0  # number of most likely tokens to return for each output token
    # Log-probabilities of the prompt's tokens from the second on, with the k most likely tokens of each position.
    prompt_log_probs: int | None = None
    prompt_hidden_states: HiddenRows | None = None  # input of the output head, for the prompt's last token or for all
    prompt_logits_of: tuple[int, ...] = ()  # ids of tokens whose logits behind the whole prompt are returned
    exclude_input_from_output: bool = False  # non-streaming only: leave the prompt out of output_token_ids
    return_perf_metrics: bool = False
    return_context_logits: bool = False  # logits of the prompt's positions; needs model.gather_context_logits
    return_generation_logits: bool = False  # logits that output tokens came from; needs model.gather_generation_logits
    additional_outputs: tuple[AdditionalOutput, ...] = ()
    return_history: bool = False  # turns of sessions: the token ids before this turn, once, with its first response


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
