"""Request: what a client asks for. Frozen; it crosses process boundaries as msgpack."""

from __future__ import annotations

import hashlib
from typing import ClassVar, NewType

import msgspec
from msgspec import Struct

from backend.api.guide import Guide, Thinking
from backend.api.images import ImageInput, with_content_ids
from backend.api.lora import LoraConfig
from backend.api.outputs import OutputConfig
from backend.api.sampling import SamplingConfig
from backend.api.tensor import TensorData

RequestId = NewType("RequestId", int)  # uint64, unique among the live requests of one engine
SessionId = NewType("SessionId", int)  # uint64, TurboMind's CORRID


DEFAULT_RETENTION_PRIORITY = 35
BACKGROUND = 0.0  # the priority of requests that run in what all others leave


class TokenRangeRetention(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How long KV of prompt tokens [token_start, token_end) is kept; None = to the prompt's end."""

    token_start: int
    token_end: int | None = None
    priority: int = DEFAULT_RETENTION_PRIORITY  # 0 to 100; lower ones are evicted first
    duration_s: float | None = None  # a higher priority than the default falls to that afterwards; None = it never does


class RetentionConfig(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which blocks of a request's KV are evicted later than others after the request has ended.

    A block takes the priority of the range that holds its first token; without one the default priority. `decode_priority`:
    for blocks that begin with an output token. The tokens ahead of a block are kept as long as the block.

    After TensorRT-LLM's KvCacheRetentionConfig.
    """

    token_ranges: tuple[TokenRangeRetention, ...] = ()
    decode_priority: int = DEFAULT_RETENTION_PRIORITY
    decode_duration_s: float | None = None

    def of_token(self, position: int, num_prompt_tokens: int) -> tuple[int, float | None]:
        """(priority, seconds for which it holds) of a block whose first token is at `position`."""
        if position >= num_prompt_tokens:
            return self.decode_priority, self.decode_duration_s
        for span in self.token_ranges:
            if span.token_start <= position and (span.token_end is None or position < span.token_end):
                return span.priority, span.duration_s
        return DEFAULT_RETENTION_PRIORITY, None


class SessionConfig(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Makes the request one turn of a session: a sequence that outlives its requests (docs/features.md, 004).

    `start` creates the session, or resets one of the same id. Without it the session must exist, and the turn continues at
    its end, or after `step` tokens of it (rewind; a step beyond the end is clamped to it).
    `full_history`: the input holds the whole conversation rather than the new tokens; the session keeps the common prefix.
    `end` erases the session when this turn is over.
    """

    id: SessionId
    start: bool = False
    end: bool = False
    step: int | None = None
    session_len: int | None = None  # prompt + history + output are cut to this many tokens
    full_history: bool = False


class KvOrigin(Struct, frozen=True, omit_defaults=True):
    """All that the KV of a request depends on besides its token ids.

    `lora_id` and `lora_name`: the adapter, as the client calls it. `digest`: hash of the adapter and of `extra_inputs`,
    `extra_ids`, `prompt_embeddings` and `position_ids`; empty for a request that has none of all these.
    """

    cache_salt: str = ""
    lora_id: int | None = None
    lora_name: str = ""
    digest: str = ""
    has_inputs: bool = False  # the digest covers more than the adapter

    @property
    def namespace(self) -> str:
        """Requests with different namespaces never share KV."""
        return f"{self.cache_salt}\0{self.digest}" if self.digest else self.cache_salt


_TOKENS_ALONE = KvOrigin()  # one object for all anonymous requests: an idle session keeps its origin


class Request(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One generation request, in tokens.

    `max_tokens` 0 computes the prompt's KV and generates nothing. `end_ids`: any of them ends the output and stays in it.
    `stop_words`: token lists; the output ends as soon as its tail equals one of them. `bad_words`: token lists that are
    never completed. `timeout_s`: seconds from acceptance until the request is cut with FinishReason.TIMED_OUT.
    `cache_salt`: KV blocks are shared only between requests of the same salt.
    `priority`: 0 to 1; waiting requests with a higher one are admitted first. Running and paused requests are not affected,
    but those of priority BACKGROUND (0), which run in what all others leave (backend/scheduler/background.py).
    `retention`: how long its KV outlives that of others; None = like all.
    `logits_post_processor`: the name of a callable of the engine's that changes the logits before a token is chosen;
    BATCHED_POST_PROCESSOR_NAME names the one that is called once an iteration.
    `draft_tokens`: guesses at the output, from its first token on. They are verified, several in a step, and change no token.
    `ends_after_drafts`: the output ends with the first token that differs from `draft_tokens` or follows the last of them.
    `speculation`: whether the engine may guess at tokens by itself, where the configuration says so.
    `max_draft_tokens`: how many of these guesses a step may try, at most; unset: as many as the configuration says.
    `context_only`: the prompt is computed and one token sampled; `Result.kv_state` then holds the state for another engine.
    `kv_state`: such a state, for the same prompt and parameters; the first token is sampled again, from the same logits.
    `prompt_embeddings`: a table float32 [n, hidden]; input token id `vocabulary size + i` stands for its row i.
    `position_ids`: of each input token, instead of 0, 1, 2, ...; those of the output follow the last one.
    `extra_ids`: a number for each input token that distinguishes equal ids with different embeddings; 0 = none.
    `guide`: the form that the output must have.
    `thinking`: the output begins with reasoning; the guide applies behind it, and it may have a budget.
    `extra_inputs`: what a model takes besides tokens (encoded images, for instance), by name; handed to the model as it is.
    Models that take none refuse them. KV is shared only between requests that agree in these four fields; zeros at the end of
    `extra_ids` do not count.
    `images`: in the order in which their tokens stand in the prompt. KV is shared by their content, wherever they stand.
    `lora`: the adapter that it runs with; KV is shared only between requests with the same one.
    """

    input_token_ids: list[int]
    max_tokens: int
    streaming: bool = False
    sampling_config: SamplingConfig = SamplingConfig()
    output_config: OutputConfig = OutputConfig()
    end_ids: tuple[int, ...] = ()
    stop_words: list[list[int]] = []
    bad_words: list[list[int]] = []
    client_id: int | None = None
    return_all_generated_tokens: bool = False
    session: SessionConfig | None = None
    timeout_s: float | None = None
    cache_salt: str = ""
    extra_inputs: dict[str, bytes] = {}
    priority: float = 0.5
    retention: RetentionConfig | None = None
    logits_post_processor: str = ""
    prompt_embeddings: TensorData | None = None
    position_ids: list[int] | None = None
    extra_ids: list[int] = []
    guide: Guide | None = None
    thinking: Thinking | None = None
    lora: LoraConfig | None = None
    draft_tokens: list[int] = []
    ends_after_drafts: bool = False
    speculation: bool = True
    max_draft_tokens: int | None = None
    context_only: bool = False
    kv_state: bytes = b""
    images: tuple[ImageInput, ...] = ()

    BATCHED_POST_PROCESSOR_NAME: ClassVar[str] = "batched"

    @property
    def is_background(self) -> bool:
        return self.priority == BACKGROUND

    @property
    def adapter(self) -> str:
        """Content hash of the adapter, once the engine knows it; empty without an adapter."""
        return "" if self.lora is None else self.lora.content

    @property
    def content_ids(self) -> list[int]:
        """The prompt's token ids as the engine knows them: those of an image follow from its content."""
        return with_content_ids(self.input_token_ids, self.images)

    @property
    def namespace(self) -> str:
        """Requests with different namespaces never share KV."""
        return self.kv_origin.namespace

    @property
    def kv_origin(self) -> KvOrigin:
        has_inputs = bool(
            (self.extra_inputs or any(self.extra_ids))
            or self.prompt_embeddings is not None
            or self.position_ids is not None
        )
        lora = self.lora
        if not has_inputs and lora is None:
            return KvOrigin(self.cache_salt) if self.cache_salt else _TOKENS_ALONE
        extra_ids = list(self.extra_ids)
        while extra_ids and not extra_ids[-1]:
            extra_ids.pop()
        parts = sorted(self.extra_inputs.items()), extra_ids, self.prompt_embeddings, self.position_ids
        digest = hashlib.blake2b(msgspec.msgpack.encode((parts, self.adapter)), digest_size=32)
        lora_id, lora_name = (None, "") if lora is None else (lora.task_id, lora.name or str(lora.task_id))
        return KvOrigin(self.cache_salt, lora_id, lora_name, digest.hexdigest(), has_inputs)
