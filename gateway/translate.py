"""OpenAI's requests as requests of the Triton model. Pure functions; GatewayError(400) names what cannot be served."""

from __future__ import annotations

from typing import Any, NamedTuple

from backend.api.sampling import PLAIN
from gateway.dialect import DEFAULT, Dialect
from gateway.errors import GatewayError
from gateway.formats import asked_form
from gateway.images import Content, Picture, check_image_role, content_of
from gateway.items import Item, turns_of
from gateway.messages import ChatMessage, ChatRequest, Completing, CompletionRequest, Sampling, TextPart
from gateway.origin import Form, GuideOrigin
from gateway.response_messages import LOGPROBS, Asking, ResponseRequest
from gateway.tools import form_of_answer, form_of_tools, shown_tools, template_fields

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's own default of /v1/completions
_SAME_NAME = (
    *(field.name for field in PLAIN),
    *("min_tokens", "ignore_eos", "bad_words"),
    *("stop_token_ids", "presence_penalty", "frequency_penalty", "logit_bias"),
)
NO_LIMIT = -1  # a value of max_tokens
_OF_BEAMS = ("use_beam_search", "length_penalty", "early_stopping")


class Asked(NamedTuple):
    """A request of the Triton model, and what its guide was made of."""

    request: dict[str, Any]
    origin: GuideOrigin | None


def _asked(request: dict[str, Any], form: Form | None) -> Asked:
    return Asked(request, None) if form is None else Asked({**request, "guide": form.guide}, form.origin)


def chat(message: ChatRequest, dialect: Dialect = DEFAULT) -> Asked:
    """One request, for all choices."""
    if message.top_logprobs and not message.logprobs:
        raise GatewayError(400, "top_logprobs needs logprobs: true", "top_logprobs", "invalid_value")
    _check_stream_options(message)
    request: dict[str, Any] = {
        **conversation(message),
        **sampling(message),
        **_limits(message),
        **_choices(message),
        **_told(message),
        **dialect.fields(message),
    }
    form = form_of_answer(message, dialect.tools)
    if message.logprobs:
        request["logprobs"] = message.top_logprobs or 0
    return _asked(request | _prompt_scores(message), form)


def _prompt_scores(message: Completing) -> dict[str, Any]:
    """The request for the log-probabilities of the prompt's tokens. Raises GatewayError for what cannot be had with them."""
    if message.prompt_logprobs is None:
        return {}
    other = next((name for name in ("stream", "echo", "suffix") if getattr(message, name, None)), None)
    if other is not None:
        text = f"prompt_logprobs cannot be had with {other}; leave one out"
        raise GatewayError(400, text, "prompt_logprobs", "invalid_value")
    return {"prompt_logprobs": message.prompt_logprobs}


def conversation(message: ChatRequest) -> dict[str, Any]:
    """Messages, tools and variables of the chat template, from which the prompt is rendered. Raises GatewayError."""
    turns = [chat_turn(turn, i) for i, turn in enumerate(message.messages)]
    return {"messages": turns, **shown_tools(message), **_rendering(message)}


def _rendering(message: ChatRequest) -> dict[str, Any]:
    """Variables of the chat template besides messages and tools. Raises GatewayError."""
    if message.add_generation_prompt and message.continue_final_message:
        text = "continue_final_message and add_generation_prompt exclude each other; leave one out"
        raise GatewayError(400, text, "continue_final_message", "invalid_value")
    request: dict[str, Any] = {}
    if message.add_generation_prompt is False:
        request["add_generation_prompt"] = False
    if message.continue_final_message:
        request["continue_final_message"] = True
    variables = _template_variables(
        message.chat_template_kwargs, message.reasoning_effort, message.verbosity, _thinks(message)
    )
    return request | variables


def _thinks(message: ChatRequest) -> bool | None:
    """True if the request asks for reasoning, False if it forbids it, None if it says neither.

    Raises GatewayError for two names that differ.
    """
    if message.thinking is None:
        return message.enable_thinking
    is_on = message.thinking.type == "enabled"
    if message.enable_thinking not in (None, is_on):
        text = "thinking and enable_thinking mean the same and differ; send one of them"
        raise GatewayError(400, text, "thinking", "invalid_value")
    return is_on


def _template_variables(
    given: dict[str, Any] | None, effort: str | None, verbosity: str | None, thinks: bool | None = None
) -> dict[str, Any]:
    """Variables of some models' templates; others do not look at them."""
    own = {"reasoning_effort": effort, "verbosity": verbosity, "enable_thinking": thinks}
    variables = {name: value for name, value in own.items() if value is not None} | (given or {})
    return {"chat_template_kwargs": variables} if variables else {}


def chat_turn(turn: ChatMessage, index: int) -> dict[str, Any]:
    """A message for the chat template: text, tool calls and their results, `developer` by its older name."""
    if turn.role == "tool" and turn.tool_call_id is None:
        text = "a message of role tool has no tool_call_id; say which call it answers"
        raise GatewayError(400, text, f"messages[{index}].tool_call_id", "invalid_value")
    if turn.content is None and turn.role != "assistant":
        text = f"a message of role {turn.role} has no content; give it some, or leave the message out"
        raise GatewayError(400, text, f"messages[{index}].content", "invalid_value")
    name = {} if turn.name is None else {"name": turn.name}
    content = _content(turn, index)
    return {"role": _template_role(turn.role), "content": content, **name, **template_fields(turn)}


def _content(turn: ChatMessage, index: int) -> Content:
    """Raises GatewayError for an image that the user has not sent."""
    if turn.content is None or isinstance(turn.content, str):
        return turn.content or ""
    parts: list[str | Picture] = []
    for number, part in enumerate(turn.content):
        if isinstance(part, TextPart):
            parts.append(part.text)
            continue
        place = f"messages[{index}].content[{number}]"
        check_image_role(turn.role, place)
        parts.append(Picture(f"{place}.image_url", part.url))
    return content_of(parts)


def completions(message: CompletionRequest) -> list[Asked]:
    """One request for each prompt, for all its choices."""
    _check_stream_options(message)
    common = {**sampling(message), **_limits(message), **_choices(message), **_told(message)}
    if message.max_tokens is None and message.max_completion_tokens is None:
        common["max_tokens"] = DEFAULT_COMPLETION_TOKENS
    if message.best_of is not None and message.best_of > 1:
        common["best_of"] = message.best_of
    if message.logprobs is not None:
        common["logprobs"] = message.logprobs
    if message.echo:
        common["echo"] = True
        if message.logprobs is not None:
            common["prompt_logprobs"] = message.logprobs
    common |= _prompt_scores(message)
    form = asked_form(message)
    return [_asked({**prompt, **common}, form) for prompt in _prompts(message)]


def _limits(message: Completing) -> dict[str, Any]:
    """How long the answer may and must be, where that is said. Raises GatewayError for two names that differ."""
    found: dict[str, Any] = {}
    for name, other in (("max_tokens", "max_completion_tokens"), ("min_tokens", "min_new_tokens")):
        given = {value for value in (getattr(message, name), getattr(message, other)) if value is not None}
        if len(given) == 2:
            text = f"{name} and {other} mean the same and differ; send one of them"
            raise GatewayError(400, text, name, "invalid_value")
        if given:
            found[name] = given.pop()
    return {name: value for name, value in found.items() if value != NO_LIMIT}


def _choices(message: Completing) -> dict[str, Any]:
    """How many choices there are, and how they are found."""
    beams = {name: value for name in _OF_BEAMS if (value := getattr(message, name)) is not None}
    return {"n": message.n, **beams} if message.n not in (None, 1) else beams


def _told(message: Completing) -> dict[str, Any]:
    """The request for facts of the prompt, its ids or their number, which come with the first piece of each choice."""
    if message.return_token_ids:
        return {"tell_prompt": "token_ids"}
    options = message.stream_options
    return {"tell_prompt": "counts"} if options is not None and options.continuous_usage_stats else {}


def replies_generated(message: Completing) -> int:
    """How many sequences the model generates for a request, those that best_of leaves out included."""
    prompts, best_of = 1, 1
    if isinstance(message, CompletionRequest):
        has_several = isinstance(message.prompt, list) and not isinstance(message.prompt[0], int)
        prompts, best_of = len(message.prompt) if has_several else 1, message.best_of or 1
    return prompts * max(message.n or 1, best_of)


def _prompts(message: CompletionRequest) -> list[dict[str, Any]]:
    prompt = message.prompt
    if message.suffix:
        return [{"fill": {"prefix": one, "suffix": message.suffix}} for one in _prefixes(message)]
    if isinstance(prompt, str):
        return [{"prompt": prompt}]
    if isinstance(prompt[0], int):
        return [{"prompt_token_ids": prompt}]
    return [{"prompt": one} if isinstance(one, str) else {"prompt_token_ids": one} for one in prompt]


def _prefixes(message: CompletionRequest) -> list[str]:
    """The prompts of a request that has a suffix. Raises GatewayError."""
    if message.echo:
        text = "echo and suffix exclude each other: the answer is what stands between prompt and suffix; leave one out"
        raise GatewayError(400, text, "echo", "invalid_value")
    prompts = [message.prompt] if isinstance(message.prompt, str) else message.prompt
    if not all(isinstance(one, str) for one in prompts):
        text = "suffix needs a prompt of text, not of token ids; send the text"
        raise GatewayError(400, text, "prompt", "invalid_value")
    return [one for one in prompts if isinstance(one, str)]


def response(message: ResponseRequest, earlier: list[Item], items: list[Item], dialect: Dialect = DEFAULT) -> Asked:
    """The one request of /v1/responses. `earlier`: what previous_response_id stands for; `items`: its own input."""
    for name in ("include_usage", "continuous_usage_stats"):
        if message.stream_options is not None and getattr(message.stream_options, name) is not None:
            text = f"stream_options.{name} belongs to chat completions; the last event has the usage anyway"
            raise GatewayError(400, text, f"stream_options.{name}", "unknown_parameter")
    _check_stream_options(message)
    request = {**asked_input(message, earlier, items), **sampling(message), **dialect.fields(message)}
    if message.max_output_tokens not in (None, NO_LIMIT):
        request["max_tokens"] = message.max_output_tokens
    if message.top_logprobs or LOGPROBS in (message.include or []):
        request["logprobs"] = message.top_logprobs or 0
    return _asked(request, form_of_answer(message, dialect.tools))


def counting(message: Asking, earlier: list[Item], items: list[Item], dialect: Dialect = DEFAULT) -> Asked:
    """A request that only tokenises the prompt."""
    form_of_tools(message, dialect.tools)
    return Asked({**asked_input(message, earlier, items), "tokenize": True}, None)


def asked_input(message: Asking, earlier: list[Item], items: list[Item]) -> dict[str, Any]:
    """The messages and template variables that the prompt of a response is rendered from."""
    system = [] if message.instructions is None else [{"role": "system", "content": message.instructions}]
    effort = None if message.reasoning is None else message.reasoning.effort
    verbosity = None if message.text is None else message.text.verbosity
    return {
        "messages": [*system, *turns_of([*earlier, *items])],
        **shown_tools(message),
        **_template_variables(None, effort, verbosity),
    }


def _template_role(role: str) -> str:
    return "system" if role == "developer" else role


def sampling(message: Sampling) -> dict[str, Any]:
    """The sampling parameters. What a client leaves out is as the model's makers recommend, else as in OpenAI's API."""
    request = {name: value for name in _SAME_NAME if (value := getattr(message, name)) is not None}
    if message.temperature is not None:
        request["temperature"] = message.temperature
    if message.top_p:
        request["top_p"] = message.top_p
    if message.top_p == 0:  # nothing but the most likely token; the model's own top_p is above 0
        request["top_k"] = 1
    elif message.top_k is not None:
        request["top_k"] = max(message.top_k, 0)  # 0 and -1 mean: all tokens
    if message.seed is not None:  # without one the model takes a random one
        request["seed"] = message.seed % (1 << 64)
    if message.stop:
        request["stop"] = [message.stop] if isinstance(message.stop, str) else message.stop
    if message.include_stop_str_in_output:
        request["include_stop_in_output"] = True
    if message.skip_special_tokens is False:
        request["skip_special_tokens"] = False
    if message.stream:
        request["stream"] = True
    return request


def _check_stream_options(message: Completing | ResponseRequest) -> None:
    if message.stream_options is not None and not message.stream:
        raise GatewayError(400, "stream_options needs stream: true", "stream_options", "invalid_value")
