"""ChatTemplate: renders messages to prompt text with the model's own Jinja template, as transformers does.

The template comes with the model, never with a request. It runs in Jinja's immutable sandbox and sees plain JSON values only.
The number, size and depth of messages are limited before, and a result that grows too long is refused while it is rendered.
The sandbox bounds neither time nor memory. Servers have it rendered where both are bounded (serving/intake/rendering.py);
elsewhere the operator has to trust the model's template with messages within these limits.

The result is to be tokenised with add_special_tokens=False, because the template writes the special tokens itself.
"""

from __future__ import annotations

import logging
import os
from functools import cached_property
from pathlib import Path
from typing import Any

from backend.api.checkpoint.gguf import GgufHeader, gguf_file, read_header
from backend.api.checkpoint.model_files import MAX_JSON_BYTES, REMEDY, read_object, read_text, shown
from backend.api.errors import ConfigError, InvalidRequest, Unsupported
from backend.text.chat_families import family_of, template_of
from backend.text.template import MakeRenderer, Renderer, Templates, environment
from backend.text.tokenizer import CONFIG, Tokenizer
from backend.text.tool_prompt import knows_tools, with_tools, without_calls

FILE = "chat_template.jinja"
FILES = {"default": FILE, "tool_use": "additional_chat_templates/tool_use.jinja"}
GGUF_SETTINGS = {"default": "tokenizer.chat_template", "tool_use": "tokenizer.chat_template.tool_use"}
_FURTHER = "tokenizer.chat_template."
_log = logging.getLogger("everbatch.text")
MAX_TEMPLATE_CHARS, MAX_TEMPLATE_TAGS = 64 << 10, 4096  # which Jinja compiles within about a second
MAX_DEPTH = 16  # nesting of lists and objects in one message
MAX_TOOL_DEPTH = 80  # the same of all tools: more than a schema that a guide holds may have
_SAMPLE = "a text of which only a system message speaks"
REASONING = ("reasoning_content", "thinking", "reasoning")  # keys of an answer's reasoning; the first one given counts


class ChatTemplate:
    """One compiled template. Besides the messages it sees the `special_tokens` (bos_token, ...) as variables."""

    def __init__(
        self,
        source: str | None,
        special_tokens: dict[str, str] | None = None,
        max_messages: int = 1024,
        max_chars: int = 4_000_000,
        tools_source: str | None = None,
        make_renderer: MakeRenderer = Renderer,
    ) -> None:
        """`source` None: the model has no template, and `render` says so. Raises ConfigError when it is no valid Jinja.

        `max_chars` bounds the characters of all messages (tools included), and those of the result. `tools_source` is
        the template for requests with tools, where the model has one of its own for them. `make_renderer`: makes what
        renders, here or elsewhere.
        """
        self.source = source
        self._max_messages = max_messages
        self._max_chars = max_chars
        self._has = (source is not None, tools_source is not None or source is not None)  # without tools, and with them
        templates = Templates(source, tools_source, dict(special_tokens or {}), max_chars)
        here = Renderer(templates)  # also where another one renders: it says what is wrong with a template
        self._render = here if make_renderer is Renderer else make_renderer(templates)
        shown = source if tools_source is None else tools_source
        self._shows_tools = shown is None or knows_tools(environment().parse(shown))
        self._shows_calls = "tool_calls" in (shown or "tool_calls")

    @classmethod
    def from_directory(
        cls, path: str | Path, tokenizer: Tokenizer, file: str = "", make_renderer: MakeRenderer = Renderer, **caps: int
    ) -> ChatTemplate:
        """Read the files of FILES, else `chat_template` of tokenizer_config.json: a string, or a list with those names.

        `path` may also be a GGUF file, or a directory that holds one. `file`: a template of the operator's, which then serves
        requests with and without tools in place of the model's own. Raises ConfigError.
        """
        sources = read_templates(Path(path), file, is_logged=True)
        return cls(
            sources.get("default"),
            tokenizer.special_tokens,
            tools_source=sources.get("tool_use"),
            make_renderer=make_renderer,
            **caps,
        )

    @property
    def exists(self) -> bool:
        return self._has[0]

    def render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        further: dict[str, Any] | None = None,
        continue_final: bool = False,
    ) -> str:
        """The prompt text, as transformers' apply_chat_template has it: see `_as_given` for what a template sees.

        `further`: more variables for the template, such as enable_thinking. `continue_final`: the text ends with the last
        message's own, so that the output goes on with it; no generation prompt is added then.

        Raises Unsupported without a template, and InvalidRequest for messages that are over the limits or that the template
        refuses.
        """
        if not self._has[tools is not None]:
            raise Unsupported(
                "this model has no chat template; send the prompt as text instead of messages, or start the server with "
                "--chat-template FILE"
            )
        further = {} if further is None else further
        self._check(messages, tools, further)
        own = {"tools": tools, "add_generation_prompt": add_generation_prompt and not continue_final}
        if taken := sorted(({"messages"} | own.keys()) & further.keys()):
            raise InvalidRequest(
                f"chat_template_kwargs holds {taken[0]}, which the request has a key for; send it there"
            )
        if continue_final and not _text_of(messages[-1]):
            raise InvalidRequest(
                "continue_final_message needs text in the last message; give it some, or leave the key out"
            )
        given = [_as_given(message) for message in self._with_tools(messages, tools)]
        variables = {"documents": None, **further, **own, "messages": given}
        try:
            text = self._render(tools is not None, variables)
        except MemoryError:
            raise InvalidRequest("rendering the chat takes more memory than there is; send fewer messages") from None
        return _up_to_final(text, messages[-1]) if continue_final else text

    def _with_tools(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
        """The messages with tools, calls and results as text, as far as the template knows none of its own for them."""
        if not self._shows_calls and any(message.get("tool_calls") for message in messages):
            messages = without_calls(messages)
        return messages if self._shows_tools or not tools else with_tools(messages, tools, self._takes_system)

    @cached_property
    def _takes_system(self) -> bool:
        """False for a template that refuses system messages or leaves them out."""
        sample = [{"role": "system", "content": _SAMPLE}, {"role": "user", "content": "Hello"}]
        try:
            return _SAMPLE in self._render(True, {"messages": sample, "add_generation_prompt": True})
        except InvalidRequest:
            return False

    def _check(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, further: dict[str, Any]
    ) -> None:
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise InvalidRequest("messages must be a list of objects, each with a role and a content")
        if not 1 <= len(messages) <= self._max_messages:
            limit = f"allowed is 1 to {self._max_messages}"
            raise InvalidRequest(f"there are {len(messages)} messages, {limit}; drop older ones")
        for message in messages:
            if not isinstance(message.get("role"), str):
                raise InvalidRequest("a message has no role; give it one such as user, assistant or system")
        parts = (  # with the most levels of each
            (messages, MAX_DEPTH + 2, f"a message is nested deeper than {MAX_DEPTH} levels; flatten it"),
            (tools, MAX_TOOL_DEPTH, f"the tools are nested deeper than {MAX_TOOL_DEPTH} levels; flatten them"),
            (further, MAX_DEPTH, f"chat_template_kwargs is nested deeper than {MAX_DEPTH} levels; flatten it"),
        )
        chars = sum(_count_chars(*part) for part in parts)
        if chars > self._max_chars:
            raise InvalidRequest(f"the messages hold {chars} characters, allowed is {self._max_chars}; shorten them")


def _count_chars(value: Any, depth: int, too_deep: str) -> int:
    """Count the characters of all strings in a JSON value, and 1 for each other value.

    Raises InvalidRequest for a value that is not JSON, and with the message `too_deep` for one nested deeper than `depth`.
    """
    if type(value) is str:
        return len(value)
    if value is None or type(value) in (bool, int, float):
        return 1
    if depth == 0:
        raise InvalidRequest(too_deep)
    if type(value) is list:
        return 1 + sum(_count_chars(item, depth - 1, too_deep) for item in value)
    if type(value) is dict and all(type(key) is str for key in value):
        return 1 + sum(len(key) + _count_chars(item, depth - 1, too_deep) for key, item in value.items())
    raise InvalidRequest(f"a message holds a {type(value).__name__}, allowed are JSON values; convert it")


def _up_to_final(text: str, message: dict[str, Any]) -> str:
    """The rendered text up to the end of the last message's content, as transformers cuts it (continue_final_message)."""
    final = _text_of(message)
    start = text.rfind(final.rstrip())
    if start < 0:
        raise InvalidRequest(
            "the chat template changes the last message, so it cannot be continued; send it as a prompt"
        )
    kept = final if text.startswith(final, start) else final.rstrip()
    return text[: start + len(kept)]


def _text_of(message: dict[str, Any]) -> str:
    """The text of a message from its first visible character on; '' where there is none."""
    content = message.get("content")
    return content.lstrip() if isinstance(content, str) else ""


def _as_given(message: dict[str, Any]) -> dict[str, Any]:
    """A message as transformers hands it to a template: without null values, an answer's reasoning under two names."""
    given = {key: value for key, value in message.items() if value is not None}
    reasoning = next((given[key] for key in REASONING if key in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}


def read_templates(path: Path, operators: str = "", is_logged: bool = False) -> dict[str, str]:
    """The sources of a model's templates by the names of FILES. With one of the files the config's are left aside, and with a
    file of the operator's both. `is_logged`: the log says which template is taken where the model has none or others.

    Raises ConfigError for one that cannot be read, or is too long or has too many tags to be compiled.
    """
    if operators:
        return {"default": _operators_template(Path(operators))}
    if (gguf := gguf_file(path)) is not None:
        return _served_templates(read_header(gguf), is_logged)
    found = {name: (read_text(path, file, MAX_JSON_BYTES), file) for name, file in FILES.items()}
    if not any(source for source, _ in found.values()):
        place = f"{CONFIG}: chat_template"
        listed = _listed((read_object(path, CONFIG) or {}).get("chat_template"), place)
        found = {name: (listed.get(name), place) for name in FILES}
    return {name: _checked(source, place) for name, (source, place) in found.items() if source is not None}


def _operators_template(path: Path) -> str:
    file = Path(os.path.realpath(path))  # A link of the operator's own may lead anywhere.
    source = read_text(file.parent, file.name, MAX_JSON_BYTES)
    if source is None:
        raise ConfigError(f"{shown(str(path))}: File does not exist; give a file with a Jinja template")
    return _checked(source, shown(path.name))


def templates_of(header: GgufHeader) -> dict[str, str]:
    """The templates in a GGUF file, by the names of FILES: `tool_use` is for requests with tools, `default` for all others."""
    held = {name: (header.settings.get(key), f"{header.name}: {key}") for name, key in GGUF_SETTINGS.items()}
    return {name: _checked(source, place) for name, (source, place) in held.items() if source is not None}


def _served_templates(header: GgufHeader, is_logged: bool) -> dict[str, str]:
    """The templates of the file; where it has no `default`, that of its family (chat_families.py), if the family is known."""
    sources = templates_of(header)
    others = sorted(key for key in header.settings.keys() - GGUF_SETTINGS.values() if key.startswith(_FURTHER))
    if others and is_logged:
        _log.info("%s: no request uses the chat template %s", header.name, shown(", ".join(others)))
    if "default" not in sources and (family := family_of(header)) is not None:
        sources["default"] = template_of(family)
        if is_logged:
            _log.warning(
                "%s has no chat template: chats are written as models of the family %s have them, which a model without training "
                "for chats may not follow; start the server with --chat-template FILE for another",
                *(header.name, family.name),
            )
    return sources


def _listed(templates: Any, place: str) -> dict[str, Any]:
    """`chat_template` of tokenizer_config.json by name: null, a string, or [{"name": ..., "template": ...}]."""
    if not isinstance(templates, list):
        return {"default": templates}
    named = {entry.get("name"): entry for entry in templates if isinstance(entry, dict) and entry.get("template")}
    if len(named) < len(templates) or not all(isinstance(name, str) for name in named):
        raise ConfigError(
            f"{place} is {shown(templates)}, a list of objects with name and template is needed; {REMEDY}"
        )
    return {str(name): entry["template"] for name, entry in named.items()}


def _checked(source: Any, place: str) -> str:
    if not isinstance(source, str):
        raise ConfigError(f"{place} is {shown(source)}, a text is needed; {REMEDY}")
    if len(source) > MAX_TEMPLATE_CHARS:
        raise ConfigError(
            f"{place} has {len(source)} characters, at most {MAX_TEMPLATE_CHARS} are compiled; shorten it"
        )
    tags = source.count("{{") + source.count("{%")
    if tags > MAX_TEMPLATE_TAGS:
        raise ConfigError(f"{place} has {tags} tags, at most {MAX_TEMPLATE_TAGS} are compiled; shorten it")
    return source
