"""The replies of the model `everbatch`, as JSON objects."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Struct, UnsetType


class Choice(Struct, frozen=True):
    """A token with its log-probability. `bytes`: its own, which may be a part of a character only."""

    token_id: int
    token: str
    bytes: list[int]
    logprob: float | None  # None: the first token of a prompt, which follows nothing
    top: list[Choice] | UnsetType = UNSET


class Usage(Struct, frozen=True):
    """`discarded_tokens`: tokens of the sequences that `best_of` has left out, reported with the best one."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    discarded_tokens: int | UnsetType = UNSET
    reasoning_tokens: int | UnsetType = (
        UNSET  # among the output tokens; set where the request says how reasoning is marked
    )


class PromptReport(Struct, frozen=True):
    """The prompt, as it is known when the first token comes."""

    prompt_tokens: int
    cached_tokens: int
    token_ids: list[int] | UnsetType = UNSET
    files_left_out: int | UnsetType = UNSET  # files of `fill` that did not fit


class Generated(Struct, frozen=True):
    """The reply for one sequence; unset fields are left out."""

    text: str
    token_ids: list[int]
    index: int | UnsetType = UNSET
    logprobs: list[Choice] | UnsetType = UNSET
    prompt_logprobs: msgspec.Raw | UnsetType = UNSET
    prompt: PromptReport | UnsetType = UNSET
    finish_reason: str | UnsetType = UNSET
    stop_reason: str | int | None | UnsetType = UNSET
    usage: Usage | UnsetType = UNSET
    seed: int | UnsetType = UNSET
    max_model_len: int | UnsetType = UNSET
    takes_images: bool | UnsetType = UNSET
    capabilities: list[str] | UnsetType = UNSET
    tokenizer: dict[str, str] | UnsetType = UNSET
    guide_notes: tuple[str, ...] | UnsetType = UNSET  # keywords of the guide that are not held
