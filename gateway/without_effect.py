"""Keys that well-known clients send and that have no effect here: one table, by the client that sends them.

They are taken out of a request before it is checked, named in the header IGNORED of the answer, and once in the log. A key has
the values with which nothing is lost but its effect; with any other the answer would not be what the client asked for, so that
is refused with the remedy. Null asks for nothing. A key that stands in no table stays unknown, and is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from gateway.anthropic_messages import CountTokensRequest, MessagesRequest
from gateway.errors import THREAD_NOT_FOUND, GatewayError
from gateway.infill_messages import InfillRequest
from gateway.interactive_messages import InteractiveRequest
from gateway.messages import MOST_KEYS, ChatRequest, CompletionRequest, Wire
from gateway.ollama_messages import OllamaChat, OllamaEmbed, OllamaEmbeddings, OllamaGenerate
from gateway.response_messages import ConversationItems, InputTokensRequest, NewConversation, ResponseRequest
from gateway.token_messages import TokenizeRequest
from gateway.vector_messages import EmbeddingRequest, RerankRequest

IGNORED = "x-everbatch-ignored"  # header of an answer: the keys of its request that had no effect
LONGEST_VALUE = 80
Values = type | tuple[Any, ...]  # any of this type, or one of these


class Key(NamedTuple):
    """`place`: names on the way from the request to the object that it stands in, through lists too; empty: the request."""

    client: str
    messages: tuple[type[Wire], ...]
    place: str
    name: str
    values: Values
    remedy: str

    @property
    def path(self) -> str:
        return f"{self.place}.{self.name}" if self.place else self.name


CHAT, TEXT, RESPONSE = (ChatRequest,), (CompletionRequest,), (ResponseRequest,)
BOTH = (*CHAT, *TEXT)
LLAMA = (*BOTH, InfillRequest)
GENERATE = (*BOTH, *RESPONSE)
RESPONSES = (*RESPONSE, InputTokensRequest)
ANTHROPIC = (MessagesRequest, CountTokensRequest)
VECTORS = (EmbeddingRequest, RerankRequest)
WITH_CHATS = (*CHAT, TokenizeRequest)
OLLAMA_TEXT = (OllamaChat, OllamaGenerate)
OLLAMA = (*OLLAMA_TEXT, OllamaEmbed, OllamaEmbeddings)
_RUNNER_NUMBERS = "num_ctx num_batch num_keep num_gpu main_gpu num_thread repeat_last_n draft_num_predict"
_RUNNER_SWITCHES = "numa low_vram f16_kv logits_all vocab_only use_mmap use_mlock embedding_only"
_LEAVE_OUT = "leave it out"
_PENALTY = "use repetition_penalty"
_GRAMMAR = "use structured_outputs or response_format"
_NO_TRUNCATION = "nothing is cut off a prompt here; send less"
_IDS = "send the prompt as token ids to read it otherwise"


def _keys(
    client: str, messages: tuple[type[Wire], ...], values: dict[str, Values], remedy: str = _LEAVE_OUT, place: str = ""
) -> tuple[Key, ...]:
    return tuple(Key(client, messages, place, name, allowed, remedy) for name, allowed in values.items())


TABLE: tuple[Key, ...] = (
    *_keys("OpenAI", (*BOTH, *VECTORS), {"user": str}),
    *_keys("OpenAI", BOTH, {"metadata": dict, "store": bool}),
    *_keys("OpenAI", (*CHAT, *RESPONSES), {"safety_identifier": str, "prompt_cache_key": str}),
    *_keys("OpenAI", (*CHAT, *RESPONSES), {"prompt_cache_retention": str, "prompt_cache_options": dict}),
    *_keys("OpenAI", RESPONSE, {"max_tool_calls": int, "background_options": dict}),
    *_keys("OpenAI", RESPONSE, {"access_programs": dict}),
    *_keys("OpenAI", RESPONSE, {"context_management": ([],)}, "nothing is cut off an input here; send less"),
    *_keys("OpenAI", (*CHAT, *RESPONSE), {"moderation": (), "image": ()}, "it is not served here; leave it out"),
    *_keys("OpenAI", GENERATE, {"include_obfuscation": bool}, place="stream_options"),
    *_keys("OpenAI", CHAT, {"prompt_cache_breakpoint": dict}, place="messages.content"),
    *_keys("OpenAI", RESPONSES, {"prompt_cache_breakpoint": dict}, place="input.content"),
    *_keys("OpenAI", WITH_CHATS, {"detail": str}, place="messages.content.image_url"),
    *_keys("OpenAI", (InteractiveRequest,), {"detail": str}, place="prompt.content.image_url"),
    *_keys("OpenAI", RESPONSES, {"detail": str}, place="input.content"),
    *_keys("OpenAI", RESPONSES, {"detail": str}, place="input.output"),
    *_keys("OpenAI", (NewConversation, ConversationItems), {"detail": str}, place="items.content"),
    *_keys("OpenAI", CHAT, {"strict": bool}, place="tools"),
    *_keys("vLLM", (*BOTH, *VECTORS), {"request_id": str, "priority": int}),
    *_keys("vLLM", RESPONSE, {"request_id": str, "priority": int}),
    *_keys("vLLM", (*BOTH, *VECTORS), {"truncate_prompt_tokens": (), "mm_processor_kwargs": ({},)}, _NO_TRUNCATION),
    *_keys("vLLM", (*BOTH, *VECTORS), {"truncation_side": ("left", "right")}),
    *_keys("vLLM", BOTH, {"guided_decoding_backend": str, "guided_whitespace_pattern": ()}),
    *_keys("vLLM", BOTH, {"return_tokens_as_token_ids": (False,)}, "use return_token_ids"),
    *_keys("vLLM", BOTH, {"allowed_token_ids": (), "logits_processors": ([],), "vllm_xargs": ({},)}),
    *_keys("vLLM", BOTH, {"kv_transfer_params": ({},)}),
    *_keys("vLLM", BOTH, {"cache_salt": ()}, "each API key has its own cache here; leave it out"),
    *_keys("vLLM", CHAT, {"documents": ([],)}, "put them into the messages"),
    *_keys(
        "vLLM", CHAT, {"chat_template": ()}, "the server has one; it is started with --chat-template FILE for another"
    ),
    *_keys("vLLM", CHAT, {"echo": (False,)}, "use completions to have the prompt repeated"),
    *_keys("vLLM", CHAT, {"add_special_tokens": (False,)}, "the chat template writes them; leave it out"),
    *_keys("vLLM", (*TEXT, *VECTORS), {"add_special_tokens": (True,)}, _IDS),
    *_keys("vLLM", WITH_CHATS, {"chat_template_content_format": str}),
    *_keys("vLLM and SGLang", (*GENERATE, InteractiveRequest), {"spaces_between_special_tokens": bool}),
    *_keys("SGLang", GENERATE, {"stream_reasoning": bool, "rid": str}),
    *_keys("llama.cpp", LLAMA, {"cache_prompt": bool, "id_slot": int, "n_keep": int, "n_cache_reuse": int}),
    *_keys("llama.cpp", LLAMA, {"timings_per_token": bool, "return_progress": bool}),
    *_keys("llama.cpp", LLAMA, {"typical_p": (1,), "typ_p": (1,), "tfs_z": (1,)}),
    *_keys("llama.cpp", LLAMA, {"dynatemp_range": (0,), "dynatemp_exponent": float}),
    *_keys("llama.cpp", LLAMA, {"xtc_probability": (0,), "xtc_threshold": float}),
    *_keys("llama.cpp", LLAMA, {"dry_multiplier": (0,), "dry_base": float, "dry_allowed_length": int}),
    *_keys("llama.cpp", LLAMA, {"dry_penalty_last_n": int, "dry_sequence_breakers": list}),
    *_keys("llama.cpp", LLAMA, {"mirostat": (0,), "mirostat_tau": float, "mirostat_eta": float}),
    *_keys("llama.cpp", LLAMA, {"repeat_penalty": (1,), "penalize_nl": (False,)}, _PENALTY),
    *_keys("llama.cpp", LLAMA, {"repeat_last_n": int, "min_keep": int}),
    *_keys("llama.cpp", LLAMA, {"n_probs": (0,), "post_sampling_probs": (False,)}, "use logprobs"),
    *_keys("llama.cpp", LLAMA, {"grammar": ("",), "json_schema": ({},)}, _GRAMMAR),
    *_keys("llama.cpp", BOTH, {"return_tokens": bool}),
    *_keys("llama.cpp", (InfillRequest,), {"samplers": list, "n_indent": int}),
    *_keys("llama.cpp", (InfillRequest,), {"t_max_prompt_ms": int, "n_cmpl": (1,), "lora": ([],)}),
    *_keys("llama.cpp", CHAT, {"reasoning_format": ("auto", "deepseek")}, "use separate_reasoning"),
    *_keys("llama.cpp", CHAT, {"parse_tool_calls": (True,)}),
    *_keys("LM Studio", GENERATE, {"ttl": int, "draft_model": str}),
    *_keys("Ollama", (*GENERATE, *VECTORS), {"keep_alive": object}),
    *_keys(
        "Ollama",
        BOTH,
        {"options": ({},)},
        "send temperature, seed and others by themselves",
    ),
    *_keys("Ollama", OLLAMA, {"keep_alive": object}),
    *_keys("Ollama", OLLAMA, {"truncate": bool}),
    *_keys("Ollama", OLLAMA_TEXT, {"shift": bool}),
    *_keys("Ollama", OLLAMA, dict.fromkeys(_RUNNER_NUMBERS.split(), int), place="options"),
    *_keys("Ollama", OLLAMA, dict.fromkeys(_RUNNER_SWITCHES.split(), bool), place="options"),
    *_keys("Ollama", OLLAMA, {"mirostat": (0,), "mirostat_tau": float, "mirostat_eta": float}, place="options"),
    *_keys("Ollama", OLLAMA, {"tfs_z": (1,), "typical_p": (1,)}, place="options"),
    *_keys("Ollama", OLLAMA, {"penalize_newline": bool}, place="options"),
    *_keys("OpenRouter", CHAT, {"provider": dict, "transforms": ([],), "usage": dict}),
    *_keys("LiteLLM, Aider, Cline", WITH_CHATS, {"cache_control": dict}, place="messages"),
    *_keys("LiteLLM, Aider, Cline", WITH_CHATS, {"cache_control": dict}, place="messages.content"),
    *_keys("LiteLLM, Aider, Cline", WITH_CHATS, {"cache_control": dict}, place="tools"),
    *_keys("LiteLLM, Aider, Cline", WITH_CHATS, {"cache_control": dict}, place="tools.function"),
    *_keys("LiteLLM, Aider, Cline", RESPONSES, {"cache_control": dict}, place="input.content"),
    *_keys("LiteLLM, Aider, Cline", RESPONSES, {"cache_control": dict}, place="tools"),
    *_keys("Anthropic", ANTHROPIC, {"user_profile_id": str, "workspace_id": str, "diagnostics": dict}),
    *_keys("Anthropic", ANTHROPIC, {"metadata": dict, "service_tier": ("auto", "standard_only"), "inference_geo": str}),
    *_keys("Anthropic", ANTHROPIC, {"thread": ({"type": "create"},)}, "send the whole conversation in messages"),
    *_keys("Anthropic", ANTHROPIC, {"compaction": ()}, "ask for a summary in messages"),
    *_keys("Anthropic", ANTHROPIC, {"billing_policy": dict, "fallback_credit_token": str, "fallbacks": list}),
    *_keys("Bedrock and Vertex AI", ANTHROPIC, {"anthropic_version": str, "anthropic_beta": list, "betas": list}),
)


@cache
def keys_of(kind: type[Wire]) -> dict[str, dict[str, Key]]:
    """The keys that this message may have, by place and name."""
    found: dict[str, dict[str, Key]] = {}
    for key in TABLE:
        if kind in key.messages:
            found.setdefault(key.place, {})[key.name] = key
    return found


def take_out(kind: type[Wire], body: Any) -> list[Key]:
    """Take the keys of the table out of a body, which is changed. Returns those that it had, each once. Raises GatewayError."""
    taken: dict[str, Key] = {}
    for place, keys in keys_of(kind).items():
        for found in _objects(body, place.split(".") if place else []):
            for name in found.keys() & keys.keys():
                value, key = found.pop(name), keys[name]
                if value is not None:
                    _check(key, value)
                    taken[key.path] = key
    return [taken[path] for path in sorted(taken)]


def _objects(value: Any, place: list[str]) -> Iterator[dict[str, Any]]:
    """The objects at a place, whose number of keys is within the limit."""
    for one in value if isinstance(value, list) else (value,):
        if isinstance(one, dict) and len(one) <= MOST_KEYS:
            if place:
                yield from _objects(one.get(place[0]), place[1:])
            else:
                yield one


def _check(key: Key, value: Any) -> None:
    """Raise GatewayError(400) for a value with which the answer would not be what was asked for."""
    if not allows(key.values, value):
        shown = json.dumps(value)[: LONGEST_VALUE + 1] if isinstance(value, str | int | float) else _kind(value)
        shown = shown if len(shown) <= LONGEST_VALUE else shown[:LONGEST_VALUE] + "..."
        code = THREAD_NOT_FOUND if key.name == "thread" else "unsupported_parameter"
        text = f"{key.path} ({key.client}) is {shown}, which is not served here; {key.remedy}"
        raise GatewayError(400, text, key.path, code)


def _kind(value: Any) -> str:
    return "an object" if isinstance(value, dict) else "a list"


def allows(values: Values, value: Any) -> bool:
    if isinstance(values, tuple):
        return any(isinstance(value, bool) == isinstance(one, bool) and value == one for one in values)
    if values is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, values) and (values is not int or not isinstance(value, bool))


def schema_of(key: Key) -> dict[str, Any]:
    """The JSON schema of the key's values, for the page /openapi.json."""
    names = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array"}
    about = {"description": f"{key.client}: no effect here"}
    if isinstance(key.values, tuple):
        return {**about, "enum": [*key.values, None]}
    return {**about, "type": [names[key.values], "null"]} if key.values in names else about
