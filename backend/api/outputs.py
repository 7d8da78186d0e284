"""The outputs that a request asks for. Unset fields read as None, as in TensorRT-LLM's bindings."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

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
