"""Checks which requests allow drafts: verification chooses several tokens at once."""

from __future__ import annotations

from backend.api.errors import InvalidRequest, Unsupported
from backend.api.request import Request


def what_forbids_drafts(request: Request) -> str:
    """The field for which tokens can only be chosen one by one; "" if there is none.

    A post-processor is called for each token, top-p decays from token to token, rows of tensors belong to one token each, a beam
    search chooses for itself, and ids that embeddings or features of images stand for are no guesses.
    """
    sampling, output = request.sampling_config, request.output_config
    reasons = {
        "beam_width": sampling.beam_width > 1,
        "logits_post_processor": bool(request.logits_post_processor),
        "top_p_decay": sampling.decays_top_p,
        "return_generation_logits": output.return_context_logits or output.return_generation_logits,
        "additional_outputs": bool(output.additional_outputs),
        "prompt_embeddings": request.prompt_embeddings is not None,
        "images": bool(request.images),
    }
    return next((name for name, is_given in reasons.items() if is_given), "")


def drafts_of_lookahead(window_size: int, ngram_size: int, verification_set_size: int) -> int:
    """How many guesses lookahead decoding (arXiv 2402.02057) of these sizes tries in a step: an n-gram's tokens but the first.

    The other two say where its n-grams come from; here they come from lookup. Raises InvalidRequest for impossible sizes.
    """
    if window_size < 1 or ngram_size < 1 or verification_set_size < 0:
        raise InvalidRequest(
            f"lookahead has window size {window_size}, n-gram size {ngram_size} and verification set size "
            f"{verification_set_size}; the least are 1, 1 and 0"
        )
    return ngram_size - 1


def check_drafts(request: Request, takes_drafts: bool, max_seq_len: int, guesses: bool) -> None:
    """Refuse draft tokens that cannot be verified, and a number of guesses where the engine makes none (`guesses`).

    The ids are checked by the caller.
    """
    if request.max_draft_tokens is not None and request.max_draft_tokens < 0:
        raise InvalidRequest(f"max_draft_tokens is {request.max_draft_tokens}, the least is 0; raise it")
    if request.max_draft_tokens is not None and not guesses:
        raise Unsupported(
            f"max_draft_tokens is {request.max_draft_tokens} (num_draft_tokens of tensorrt_llm_bls; of lookahead decoding the "
            f"n-gram size less one), and this engine makes no guesses; start it with speculation.mode=lookup, or leave it out"
        )
    if not request.draft_tokens:
        return
    if not takes_drafts:
        raise Unsupported("draft_tokens are given, which these kernels cannot verify; leave them out")
    forbidden_by = what_forbids_drafts(request)
    if forbidden_by:
        raise InvalidRequest(
            f"draft_tokens are given with {forbidden_by}, which needs its tokens one by one; leave one out"
        )
    if len(request.draft_tokens) > max_seq_len:
        raise InvalidRequest(
            f"draft_tokens has {len(request.draft_tokens)} tokens, the limit is {max_seq_len}; shorten it"
        )
