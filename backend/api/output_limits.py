"""Checks outputs that a request asks for besides tokens, and the post-processor that it names."""

from __future__ import annotations

from backend.api.errors import InvalidRequest, Unsupported
from backend.api.outputs import OutputConfig
from backend.api.request import Request

NO_HEAD = "this checkpoint has no output head and generates nothing; ask for embeddings (/v1/embeddings)"
MAX_LOGITS = 256  # tokens whose logits behind the prompt one request may ask for


def check_outputs(output: OutputConfig, context_logits: bool, generation_logits: bool, names: list[str]) -> None:
    """Raise for tensors that the engine does not give. `names`: of the additional outputs that the configuration lists."""
    if output.return_context_logits and not context_logits:
        raise _is_off("return_context_logits", "model.gather_context_logits")
    if output.return_generation_logits and not generation_logits:
        raise _is_off("return_generation_logits", "model.gather_generation_logits")
    asked = [one.name for one in output.additional_outputs]
    for name in asked:
        if name not in names:
            raise InvalidRequest(
                f"additional output {name[:100]!r} is not known, there are: {', '.join(names) or 'none'} "
                f"(model.additional_outputs)"
            )
    if len(set(asked)) < len(asked):
        raise InvalidRequest("an additional output is named twice; name each once")


def check_prompt_log_probs(request: Request, most: int) -> None:
    """Raise for more alternatives than `most`, and for prompts whose tokens the vocabulary does not have."""
    wanted = request.output_config.prompt_log_probs
    if wanted is None:
        return
    if not 0 <= wanted <= most:
        raise InvalidRequest(f"prompt_log_probs is {wanted}, allowed is 0 to {most} (limits.max_top_log_probs)")
    if request.prompt_embeddings is not None:
        raise Unsupported(
            "prompt_log_probs cannot be had of a prompt with prompt_embeddings, whose tokens are not in the vocabulary; "
            "leave one of them out"
        )


def check_prompt_outputs(output: OutputConfig, vocab_size: int, marked: tuple[str, ...]) -> None:
    """Raise for more logits behind the prompt than MAX_LOGITS, for tokens that the vocabulary does not have, and for hidden
    states that the model does not mark as an output.
    """
    if output.prompt_hidden_states is not None and "hidden_states" not in marked:
        raise Unsupported("prompt_hidden_states cannot be had of this model, which gives logits only; leave it out")
    wanted = output.prompt_logits_of
    if len(wanted) > MAX_LOGITS:
        raise InvalidRequest(f"prompt_logits_of has {len(wanted)} tokens, the limit is {MAX_LOGITS}; leave some out")
    for token_id in wanted:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"prompt_logits_of has token {token_id}, which is outside the vocabulary; allowed is 0 to {vocab_size - 1}"
            )


def check_needs_no_head(request: Request, reads_whole_texts: bool) -> None:
    """Raise for a request to a checkpoint without an output head that asks for more than hidden states.

    `reads_whole_texts`: of an encoder, to which a request is one text.
    """
    output = request.output_config
    asks = output.prompt_log_probs is not None or output.prompt_logits_of or output.return_context_logits
    if request.max_tokens or asks or output.additional_outputs:
        raise Unsupported(NO_HEAD)
    if reads_whole_texts:
        _check_is_one_text(request)


def _check_is_one_text(request: Request) -> None:
    if request.session is not None:
        raise Unsupported("this model reads a text as a whole and has no sessions; send all of the text in one request")
    sampling = request.sampling_config
    if sampling.beam_width > 1 or (sampling.num_return_sequences or 1) > 1:
        raise Unsupported("this model gives one result for a text; leave num_return_sequences and beam_width out")


def check_post_processor(request: Request, names: tuple[str, ...], is_static: bool) -> None:
    """Raise for a logits post-processor that does not exist or cannot run."""
    name = request.logits_post_processor
    if not name:
        return
    if name not in names:
        raise InvalidRequest(
            f"logits post-processor {name[:100]!r} is not known, there are: {', '.join(names) or 'none'} "
            f"(model.logits_post_processors)"
        )
    if is_static:
        raise Unsupported(
            "logits post-processors do not run with static batches; leave logits_post_processor out, or serve with "
            "scheduler.batching=fused"
        )


def _is_off(field: str, key: str) -> Unsupported:
    return Unsupported(f"{field} needs {key}, which is off; start the engine with --set {key}=true")
