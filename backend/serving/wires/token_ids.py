"""Reads prompts of token ids: `input_ids`, `input_lengths` of the TensorRT-LLM and TurboMind wires."""

from __future__ import annotations

from backend.api import InvalidRequest
from backend.serving.intake.batch import Batch
from backend.serving.intake.requests import ServingContext
from backend.serving.wires.limits import prompt_too_long


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
