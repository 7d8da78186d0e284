"""Renderer: compiled chat templates, in Jinja's immutable sandbox with the names that transformers gives.

The sandbox bounds neither time nor memory of what a template does; serving therefore renders in a process that has limits of both
(serving/intake/rendering.py).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec import Struct

from backend.api.checkpoint.model_files import shown
from backend.api.errors import ConfigError, EverbatchError, InvalidRequest


class Templates(Struct, frozen=True, forbid_unknown_fields=True):
    """The sources of chat templates, and the texts of the special tokens, which templates see as variables."""

    source: str | None
    tools_source: str | None  # for requests with tools, where they have a template of their own
    special_tokens: dict[str, str]
    max_chars: int  # that a result may have


# Renders variables with the template for requests with tools, or with the other one. Raises EverbatchError and MemoryError.
Render = Callable[[bool, dict[str, Any]], str]
MakeRenderer = Callable[[Templates], Render]


class Renderer:
    """Renders in this process."""

    def __init__(self, templates: Templates) -> None:
        """Raises ConfigError when a source is no valid Jinja."""
        self._templates = templates
        self._default = None if templates.source is None else _compile(templates.source)
        self._with_tools = self._default if templates.tools_source is None else _compile(templates.tools_source)

    def __call__(self, with_tools: bool, variables: dict[str, Any]) -> str:
        """Raises InvalidRequest where the template refuses the variables or fails, and for a result that is too long."""
        template = self._with_tools if with_tools else self._default
        assert template is not None  # ChatTemplate has looked
        try:
            return self._joined(template.generate({**self._templates.special_tokens, **variables}))
        except (EverbatchError, MemoryError):
            raise
        except Exception as error:
            # A template is a program that may fail in any way on messages which it does not expect. That ends the request only.
            raise InvalidRequest(
                f"the chat template cannot render these messages ({type(error).__name__}); check roles and content"
            ) from error

    def _joined(self, source: Iterator[str]) -> str:
        parts: list[str] = []
        room = most = self._templates.max_chars
        for part in source:
            room -= len(part)
            if room < 0:
                raise InvalidRequest(f"the rendered chat is longer than {most} characters; send less")
            parts.append(part)
        return "".join(parts)


def _compile(source: str) -> jinja2.Template:
    """Raises ConfigError when `source` is no valid Jinja."""
    try:
        return environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        where = f"line {error.lineno}: {shown(error.message)}"
        raise ConfigError(f"the chat template is not valid at {where}; mend it") from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # raised by the compiled Python code
        reason = "it is nested too deep, or has a number of more than 4300 digits"
        raise ConfigError(f"the chat template cannot be compiled: {reason}; mend it") from error


def environment() -> ImmutableSandboxedEnvironment:
    """A sandbox with the names and filters that transformers gives to templates (its utils/chat_template_utils.py)."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        optimized=False,
    )
    made.code_generator_class = _CodeGenerator
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = _strftime_now
    made.globals["dict"] = _Dict()
    made.globals["namespace"] = _Namespace
    return made


class _Dict:
    """`dict` without the attributes of the type."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """`namespace`, with no attribute that begins with an underscore: such ones belong to Python."""

    def __init__(*args: Any, **values: Any) -> None:  # without names of its own, so that every keyword is an attribute
        self, *mappings = args
        jinja2.utils.Namespace.__init__(self)
        for name, value in dict(*mappings, **values).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(
                f"a namespace has no attribute {name!r}: it begins with an underscore"
            )
        super().__setitem__(name, value)


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Computes no constants while a template is compiled, because `{{ 9 ** 9 ** 9 }}` would then never end."""

    def _output_child_to_const(self, node: jinja2.nodes.Expr, *rest: Any) -> str:
        if not isinstance(node, jinja2.nodes.TemplateData):
            raise jinja2.nodes.Impossible
        return super()._output_child_to_const(node, *rest)


class _GenerationTag(jinja2.ext.Extension):
    """Makes {% generation %}, which marks the assistant's text for training, render nothing but its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body)
        block.set_lineno(line)
        return block

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> None:
    """Let a template refuse the messages. Its sentence goes to the client, cut off after 200 characters."""
    raise InvalidRequest(f"the chat template refuses these messages: {str(message)[:200]}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`. Unlike Jinja's own it does not escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
