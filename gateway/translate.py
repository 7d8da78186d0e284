"""OpenAI's requests as requests of the Triton model. Pure functions; GatewayError(400) names what cannot be served."""

from __future__ import annotations

from typing import Any, NamedTuple

from gateway.errors import GatewayError
from gateway.formats import asked_form, form_of
from gateway.messages import ChatMessage, ChatRequest, Completing, CompletionRequest, Sampling
from gateway.origin import Form, GuideOrigin
from gateway.response_messages import InputMessage, ResponseRequest
from gateway.tools import form_of_tools, shown_tools, template_fields

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's own default of /v1/completions
_SAME_NAME = (
    *("min_p", "repetition_penalty", "min_tokens", "ignore_eos", "bad_words"),
    *("stop_token_ids", "presence_penalty", "frequency_penalty", "logit_bias"),
)
_OF_BEAMS = ("use_beam_search", "length_penalty", "early_stopping")


class Asked(NamedTuple):
    """A request of the Triton model, and what its guide was made of."""

    request: dict[str, Any]
    origin: GuideOrigin | None


def _asked(request: dict[str, Any], form: Form | None) -> Asked:
    return Asked(request, None) if form is None else Asked({**request, "guide": form.guide}, form.origin)


def chat(message: ChatRequest) -> Asked:
    """One request, for all choices."""
    if message.top_logprobs is not None and not message.logprobs:
        raise GatewayError(400, "top_logprobs needs logprobs: true", "top_logprobs", "invalid_value")
    limits = {limit for limit in (message.max_tokens, message.max_completion_tokens) if limit is not None}
    if len(limits) == 2:
        text = "max_tokens and max_completion_tokens mean the same and differ; send one of them"
        raise GatewayError(400, text, "max_tokens", "invalid_value")
    _check_stream_options(message)
    request: dict[str, Any] = {
        "messages": [chat_turn(turn, i) for i, turn in enumerate(message.messages)],
        **sampling(message),
        **_choices(message),
        **shown_tools(message),
    }
    form = asked_form(message)
    if limits:
        request["max_tokens"] = limits.pop()
    if message.logprobs:
        request["logprobs"] = message.top_logprobs or 0
    return _asked(request, form_of_tools(message) or form)


def chat_turn(turn: ChatMessage, index: int) -> dict[str, Any]:
    """A message for the chat template: text, calls of tools and their results, `developer` by its older name."""
    if turn.role == "tool" and turn.tool_call_id is None:
        text = "a message of role tool has no tool_call_id; say which call it answers"
        raise GatewayError(400, text, f"messages[{index}].tool_call_id", "invalid_value")
    if turn.content is None and turn.role != "assistant":
        text = f"a message of role {turn.role} has no content; give it some, or leave the message out"
        raise GatewayError(400, text, f"messages[{index}].content", "invalid_value")
    content = turn.content or ""
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    name = {} if turn.name is None else {"name": turn.name}
    return {"role": _template_role(turn.role), "content": text, **name, **template_fields(turn)}


def completions(message: CompletionRequest) -> list[Asked]:
    """One request for each prompt, for all its choices."""
    if message.echo and message.logprobs is not None:
        text = "echo with logprobs asks for log-probabilities of the prompt, which are not served; leave one out"
        raise GatewayError(400, text, "logprobs", "unsupported_parameter")
    _check_stream_options(message)
    common = {**sampling(message), **_choices(message)}
    common["max_tokens"] = message.max_tokens or DEFAULT_COMPLETION_TOKENS
    if message.best_of is not None and message.best_of > 1:
        common["best_of"] = message.best_of
    if message.logprobs is not None:
        common["logprobs"] = message.logprobs
    if message.echo:
        common["echo"] = True
    form = asked_form(message)
    return [_asked({**prompt, **common}, form) for prompt in _prompts(message)]


def _choices(message: Completing) -> dict[str, Any]:
    """How many choices there are, and how they are found."""
    beams = {name: value for name in _OF_BEAMS if (value := getattr(message, name)) is not None}
    return {"n": message.n, **beams} if message.n not in (None, 1) else beams


def _prompts(message: CompletionRequest) -> list[dict[str, Any]]:
    prompt = message.prompt
    if isinstance(prompt, str):
        return [{"prompt": prompt}]
    if isinstance(prompt[0], int):
        return [{"prompt_token_ids": prompt}]
    return [{"prompt": one} if isinstance(one, str) else {"prompt_token_ids": one} for one in prompt]


def response(message: ResponseRequest, earlier: list[dict[str, Any]]) -> Asked:
    """The one request of /v1/responses; `earlier`: the turns that previous_response_id stands for."""
    if message.stream_options is not None and message.stream_options.include_usage is not None:
        text = "stream_options.include_usage belongs to chat completions; the last event has the usage anyway"
        raise GatewayError(400, text, "stream_options.include_usage", "unknown_parameter")
    _check_stream_options(message)
    system = [] if message.instructions is None else [{"role": "system", "content": message.instructions}]
    request: dict[str, Any] = {"messages": [*system, *earlier, *input_turns(message)], **sampling(message)}
    if message.max_output_tokens is not None:
        request["max_tokens"] = message.max_output_tokens
    if message.include or message.top_logprobs:
        request["logprobs"] = message.top_logprobs or 0
    return _asked(request, form_of(None if message.text is None else message.text.format, "text.format"))


def input_turns(message: ResponseRequest) -> list[dict[str, Any]]:
    """The turns that this request adds to the conversation."""
    if isinstance(message.input, str):
        return [{"role": "user", "content": message.input}]
    return [_input_turn(turn) for turn in message.input]


def _input_turn(turn: InputMessage) -> dict[str, Any]:
    content = turn.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    return {"role": _template_role(turn.role), "content": text}


def _template_role(role: str) -> str:
    return "system" if role == "developer" else role


def sampling(message: Sampling) -> dict[str, Any]:
    """What says how tokens are chosen. Of OpenAI's defaults only the temperature, 1, is sent.

    Without one the model would always take the most likely token; everything else is off unless it is asked for.
    """
    request = {name: value for name in _SAME_NAME if (value := getattr(message, name)) is not None}
    request["temperature"] = 1.0 if message.temperature is None else message.temperature
    if message.top_p:
        request["top_p"] = message.top_p
    if message.top_p == 0:  # nothing but the most likely token; the model's own top_p is above 0
        request["top_k"] = 1
    elif message.top_k is not None and message.top_k > 0:  # 0 and -1 mean: all tokens
        request["top_k"] = message.top_k
    if message.seed is not None:  # without one the model takes a random one
        request["seed"] = message.seed % (1 << 64)
    if message.stop:
        request["stop"] = [message.stop] if isinstance(message.stop, str) else message.stop
    if message.include_stop_str_in_output:
        request["include_stop_in_output"] = True
    if message.stream:
        request["stream"] = True
    return request


def _check_stream_options(message: Completing | ResponseRequest) -> None:
    if message.stream_options is not None and not message.stream:
        raise GatewayError(400, "stream_options needs stream: true", "stream_options", "invalid_value")
