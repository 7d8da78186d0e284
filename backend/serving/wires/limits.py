"""Limits on text and prompts that several fronts share, and prompts of token ids (`input_ids`, `input_lengths`)."""

from __future__ import annotations

from collections.abc import Callable

from backend.api import InvalidRequest
from backend.api.config.schema import LimitsConfig
from backend.api.request import BACKGROUND
from backend.serving.intake.batch import Batch
from backend.serving.intake.requests import ServingContext
from backend.text.tokenizer import Tokenizer

MAX_TOKEN_BYTES = 64  # a prompt of more bytes than this for each token of max_seq_len is refused before it is tokenised


def check_stops(name: str, texts: list[str], limits: LimitsConfig) -> None:
    """Raise InvalidRequest for more stop strings or bad words than allowed, or longer ones."""
    if len(texts) > limits.max_words:
        raise InvalidRequest(f"{name} holds {len(texts)} entries, the limit is {limits.max_words}; send fewer")
    num_bytes = sum(len(text.encode("utf-8", "replace")) for text in texts)
    if num_bytes > limits.max_word_bytes:
        raise InvalidRequest(
            f"{name} has {num_bytes} bytes, the limit is {limits.max_word_bytes} (limits.max_word_bytes); shorten it"
        )


def timeout_of(timeout_s: float | None, priority: float, context: ServingContext) -> float | None:
    """The time limit of a request. One that runs in what others leave takes as long as it takes, up to the longest limit."""
    if timeout_s is None or priority != BACKGROUND:
        return timeout_s
    return min(timeout_s, context.config.limits.max_timeout_s)


def most_tokens(context: ServingContext) -> int:
    """Tokens of prompt and output together that the model and the KV pool hold."""
    return min(context.model.max_seq_len, context.max_kv_tokens or context.model.max_seq_len)


def fitting_tokens(context: ServingContext, num_prompt_tokens: int) -> int:
    """As many output tokens as the model and the KV pool hold behind a prompt; at least 1, so that a prompt which fits nowhere
    is refused with its own words.
    """
    return max(1, most_tokens(context) - num_prompt_tokens)


def prompt_ids(
    tokenizer: Tokenizer, text: str, context: ServingContext, add_special_tokens: bool = True, *, room: int = 1
) -> list[int]:
    """Token ids of a prompt that leaves `room` output tokens. Raises InvalidRequest."""
    max_seq_len = context.model.max_seq_len
    return ids_within(
        tokenizer, text, max_seq_len - room, lambda count: prompt_too_long(count, max_seq_len), add_special_tokens
    )


def ids_within(
    tokenizer: Tokenizer,
    text: str,
    most: int,
    too_long: Callable[[int | str], InvalidRequest],
    add_special_tokens: bool = True,
) -> list[int]:
    """Token ids of a text; one that certainly has more than `most` is refused before it is tokenised.

    Raises what `too_long` makes of the number of tokens.
    """
    if len(text) > most and (least := tokenizer.least_tokens(text)) > most:
        raise too_long(f"at least {least}")
    ids = tokenizer.encode(text, add_special_tokens)
    if len(ids) > most:
        raise too_long(len(ids))
    return ids


def check_length(num_tokens: int, context: ServingContext) -> None:
    """Raise InvalidRequest for a prompt that leaves no output token."""
    if num_tokens >= context.model.max_seq_len:
        raise prompt_too_long(num_tokens, context.model.max_seq_len)


def prompt_too_long(num_tokens: int | str, max_seq_len: int) -> InvalidRequest:
    return InvalidRequest(
        f"the prompt has {num_tokens} tokens, the limit is {max_seq_len - 1}: shorten it, or serve with a larger "
        "model.max_seq_len"
    )


def read_prompt(batch: Batch, row: int, context: ServingContext, num_virtual: int = 0) -> list[int]:
    """The row's token ids without padding, of which `num_virtual` may lie beyond the vocabulary. With triton.clamp_token_ids
    those that are still greater count as the last one.

    They are checked as an array, so no list is built of a prompt that is refused.
    """
    vocab_size, max_seq_len = context.model.vocab_size, context.model.max_seq_len
    ids = batch.vector("input_ids", row)
    if ids is None:
        raise InvalidRequest("A value is required for input_ids")
    length = batch.scalar("input_lengths", row)
    if length is None:
        length = ids.size
    if not 0 <= length <= ids.size:
        raise InvalidRequest(f"input_lengths is {length}, allowed is 0 to {ids.size}, the width of input_ids")
    ids = ids[:length]
    if length == 0:
        raise InvalidRequest("Invalid format for input_ids: the prompt is empty; give at least 1 token")
    if length > max_seq_len:
        raise prompt_too_long(length, max_seq_len)
    if context.config.triton.clamp_token_ids:
        ids = ids.clip(max=vocab_size + num_virtual - 1)
    wrong = ids[(ids < 0) | (ids >= vocab_size + num_virtual)]
    if wrong.size:
        table = " and the rows of prompt_embedding_table" if num_virtual else ""
        raise InvalidRequest(
            f"input_ids holds {wrong[0]}, allowed is 0 to {vocab_size + num_virtual - 1} (the vocabulary{table})"
        )
    prompt: list[int] = ids.tolist()
    return prompt
