"""Sentences for requests that do not fit the messages: which parameter, its value, what is allowed."""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import pydantic

from gateway.bodies import decoded
from gateway.errors import GatewayError
from gateway.formats import OLDER_FORMS
from gateway.messages import TAG, Wire
from gateway.without_effect import Key, keys_of, take_out

LONGEST_VALUE = 80
_OLDER = "is not served here; use tools and tool_choice of chat completions"
_TEXT_ONLY = "is not served: the models read and write text only; leave it out"
_NOT_HERE = "is not served here; leave it out"
REFUSED = {
    "functions": _OLDER,
    "function_call": f'other than "none" or "auto" {_OLDER}',
    "modalities": f'other than ["text"] {_TEXT_ONLY}',
    "audio": _TEXT_ONLY,
    "prediction": _NOT_HERE,
    "web_search_options": _NOT_HERE,
    "return_hidden_states": "true is not served here; leave it out",
    "no_stop_trim": "true is not served by this name; use include_stop_str_in_output",
    "background": "true is not served here; leave it out",
    "truncation": 'other than "disabled" is not served here; send less input',
}
_IN_CHATS = "is not served by this endpoint; use chat completions"
_TOOLS = {"tools": _IN_CHATS, "tool_choice": f'other than "none" or "auto" {_IN_CHATS}'}
_FORMAT = "belongs to the other endpoints; use text.format"
_TEXT = {"text": "belongs to /v1/responses; use response_format"}
_KWARGS = {"kwargs": "is taken when it is empty only; send its keys beside the others"}
_NO_TEMPLATE = "is told to a chat template, which this endpoint does not use; use chat completions, or leave it out"
# A field that only one endpoint has -> what is refused there besides.
_REFUSED_OF = {
    "session_id": dict.fromkeys(("image_url", "mm_processor_kwargs"), _TEXT_ONLY),
    "do_preprocess": {"add_bos": "false is not how the model reads a text; leave it out"},
    "raw": {
        "template": "is not taken from requests: the server has the model's; it is started with --chat-template FILE for another",
        "context": "is not served: send the whole conversation to /api/chat, whose beginning is found in the cache",
    },
    "system": {"container": _NOT_HERE, "mcp_servers": "is not served here; the client calls tools itself"},
    "messages": {**_TEXT, **_KWARGS, "reasoning": "belongs to /v1/responses; use reasoning_effort"},
    "suffix": {**_TEXT, **_KWARGS, **_TOOLS, **dict.fromkeys(("reasoning", "reasoning_effort"), _NO_TEMPLATE)},
    "previous_response_id": {
        "reasoning_effort": "belongs to chat completions; use reasoning.effort",
        "prompt_logprobs": "belongs to chat completions; use that endpoint",
        **dict.fromkeys(("response_format", "structured_outputs", *OLDER_FORMS), _FORMAT),
    },
}
_REFUSED_IN_MESSAGES = {
    **{name: REFUSED[name] for name in ("function_call", "audio")},
    "file_id": "is not served: this server keeps no files; send image_url with a data: URL",
}
# Names of one thing in this API's endpoints and in others; where several are known, the first one is meant.
_SAME = (
    ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens"),
    ("messages", "input", "prompt"),
    ("stop", "stop_sequences", "stop_words"),
    ("model", "lora_name", "lora", "lora_request", "adapter_id"),
)
_TOLD_BY_TYPE = ("response_format", "format")  # objects whose `type` says their form; pydantic names that behind them
_FORM = re.compile(
    r"str|int|float|bool|none|literal|message|function_call(?:_output)?|constrained-\w+|[\w-]+\[.*\]|function-.*|\w+-block|[A-Z]\w+"
)
_OBJECT = re.compile(r"a valid dictionary(?: or instance of \w+)?")
# Types of content that is neither text nor image, in all APIs.
_NOT_READ = ("document", "container_upload", "file", "input_file", "input_audio", "audio_url", "video_url", "video")
_IT = "it should be "
_PLAIN = {
    "a valid string": "a text",
    "a valid integer": "an integer",
    "a valid number": "a number",
    "a valid boolean": "true or false",
    "a valid list": "a list",
    "a valid array": "a list",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "less than": "below",
}
_BOUND = re.compile("^(?:at least|at most|below) ")
_BOOLEAN = re.compile(r"(?<=should be )(True|False)$")  # as pydantic writes JSON's true and false
_Message = TypeVar("_Message", bound=Wire)


def parse(kind: type[_Message], body: bytes) -> tuple[_Message, list[Key]]:
    """The message in a JSON body, and what of it has no effect. Raises GatewayError(400) that names the first thing that is
    wrong.
    """
    value = decoded(body)
    ignored = take_out(kind, value)
    try:
        return kind.model_validate(value), ignored
    except pydantic.ValidationError as error:
        found = error.errors(include_url=False)
    raise _refusal(found, _fields_of(kind))


@dataclass(frozen=True)
class Fields:
    """Names of a message's own fields, and of those of the messages in it; and what of its own is refused, with the reason."""

    own: frozenset[str]
    inner: frozenset[str]
    refused: dict[str, str]

    def __contains__(self, name: object) -> bool:
        return name in self.own or name in self.inner


def _refusal(found: list[Any], fields: Fields) -> GatewayError:
    worst = max(found, key=lambda error: _rank(error, fields))
    path = _path(worst, fields)
    name = _dotted(path)
    logged = _dotted([part for part in path if isinstance(part, int) or part in fields])
    if worst["type"].startswith("union_tag"):
        return _other_form(name, worst["ctx"])
    is_unknown = worst["type"] == "extra_forbidden"
    refused = _refused(path, is_unknown, fields)
    if refused is not None:
        text = f"{refused} {(_REFUSED_IN_MESSAGES | fields.refused)[refused]}"
        return GatewayError(400, text, name, "unsupported_parameter", logged=refused)
    if is_unknown:
        nearest = _nearest(path, fields)
        missing = _missing_beside(path, found, fields) if nearest in (None, path[-1]) else None
        if missing is not None:
            text = f"unknown parameter {name}; did you mean {missing}, which is missing?"
            return GatewayError(400, text, missing, "missing_required_parameter")
        return _unknown(name, None if nearest == path[-1] else nearest)
    if worst["type"] == "missing":
        return GatewayError(400, f"{name} is missing", name, "missing_required_parameter", logged=logged)
    if not name:
        text = f"the body is {_shown(worst['input'])}; {_allowed(found, worst, fields)}"
        return GatewayError(400, text, code="invalid_json")
    if worst["input"] == [] and any(error["type"] == "too_short" and _path(error, fields) == path for error in found):
        return GatewayError(400, f"{name} is empty; give at least one entry", name, "invalid_value", logged=logged)
    text = f"{name} is {_shown(worst['input'])}; {_allowed(found, worst, fields)}"
    return GatewayError(400, text, name, "invalid_value", logged=logged)


def _other_form(name: str, context: dict[str, Any]) -> GatewayError:
    """The key that says the form of an object is missing, or says one that there is not."""
    key = context["discriminator"].strip("'")
    key = "type" if key.endswith("()") else key  # a function that reads it, where a form may leave it out
    place = f"{name}.{key}"
    if "tag" not in context:
        return GatewayError(400, f"{place} is missing", place, "missing_required_parameter")
    tag = context["tag"].removesuffix(TAG)
    if tag in _NOT_READ and not name.endswith(".source"):  # a source names where an image comes from
        text = (
            f"{place} is {_shown(tag)}, which is not served: models read text, and some read images; send one of these"
        )
        return GatewayError(400, text, place, "unsupported_parameter")
    forms = context["expected_tags"].replace("'", "").replace(TAG, "")
    text = f"{place} is {_shown(tag)}; it is one of {forms}"
    return GatewayError(400, text, place, "invalid_value")


def _refused(path: list[int | str], is_unknown: bool, fields: Fields) -> str | None:
    """The refused parameter that a path leads to: one of the request, or one of an earlier answer's message.

    An unknown key in such a parameter (`is_unknown`) is a spelling mistake, so the key itself is reported.
    """
    if path and path[0] in fields.refused and not (is_unknown and len(path) > 1):
        return str(path[0])
    return next((str(part) for part in path if part in _REFUSED_IN_MESSAGES), None)


def _unknown(name: str, nearest: str | None) -> GatewayError:
    remedy = "leave it out" if nearest is None else f"did you mean {nearest}?"
    logged = "" if nearest is None else f"like {nearest}"
    text = f"unknown parameter {name or repr(name)}; {remedy}"
    return GatewayError(400, text, name, "unknown_parameter", logged=logged)


def _missing_beside(path: list[int | str], found: list[Any], fields: Fields) -> str | None:
    """The required name that is missing in the object of an unknown key, which probably stands in its place."""
    missing = (_path(error, fields) for error in found if error["type"] == "missing")
    return next((_dotted(each) for each in missing if each[:-1] == path[:-1] and len(each) > 1), None)


def _nearest(path: list[int | str], fields: Fields) -> str | None:
    """The known name that an unknown key at this place probably stands for."""
    key, known = str(path[-1]), fields.own if len(path) == 1 else fields.inner
    same = [other for group in _SAME if key in group for other in group if other in known]
    near = same or difflib.get_close_matches(key[:LONGEST_VALUE], known, n=1)
    return near[0] if near else None


def _rank(error: Any, fields: Fields) -> tuple[bool, bool, int, list[int]]:
    """Which of several errors says most: a part of another type, an unknown key, then the one that lies deepest, then the one
    of the form that fitted the most items of a list.
    """
    path = _path(error, fields)
    other_type = (error["type"] == "literal_error" and path[-1:] == ["type"]) or error["type"].startswith("union_tag")
    indices = [part for part in path if isinstance(part, int)]
    return other_type, error["type"] == "extra_forbidden", len(path), indices


def _allowed(found: list[Any], worst: Any, fields: Fields) -> str:
    """Everything that could stand in this place, of all the forms that were tried."""
    path = _path(worst, fields)
    sentences = dict.fromkeys(_detail(error["msg"]) for error in found if _path(error, fields) == path)
    if len(sentences) == 1:
        return next(iter(sentences))
    alternatives = [_BOUND.sub("a number of \\g<0>", one.removeprefix(_IT)) for one in sentences]
    return f"{_IT}{', '.join(alternatives[:-1])} or {alternatives[-1]}"


def _detail(sentence: str) -> str:
    """A sentence of pydantic in plain words."""
    sentence = _BOOLEAN.sub(lambda found: found[0].lower(), sentence[:300])
    sentence = _OBJECT.sub("an object", sentence).replace("Input should be ", _IT).replace("Input should", "it should")
    for theirs, plain in _PLAIN.items():
        sentence = sentence.replace(theirs, plain)
    return sentence[:1].lower() + sentence[1:]


def _path(error: Any, fields: Fields) -> list[int | str]:
    """The names and indices in pydantic's location that the client wrote, without the union members that pydantic tried."""
    location: tuple[int | str, ...] = error["loc"]
    if location[-1:] == ("[key]",) and error["type"] != "extra_forbidden":
        location = location[:-1]
    location = tuple(part for ahead, part in zip(("", *location), location) if ahead not in _TOLD_BY_TYPE)
    kept = [part for part in location[:-1] if isinstance(part, int) or part in fields]
    is_key = error["type"] == "extra_forbidden"  # the last part is a client's own, whatever it looks like
    return kept + [part for part in location[-1:] if is_key or part in fields or not _is_form(part)]


def _is_form(part: int | str) -> bool:
    return isinstance(part, str) and _FORM.fullmatch(part) is not None


def _dotted(path: list[int | str]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    return text if len(text) <= LONGEST_VALUE else text[:LONGEST_VALUE] + "..."


def _shown(value: Any) -> str:
    if isinstance(value, list | dict):
        return "an object" if isinstance(value, dict) else "a list"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = repr(value[: LONGEST_VALUE + 1] if isinstance(value, str) else value)
    return text if len(text) <= LONGEST_VALUE else text[:LONGEST_VALUE] + "..."


@cache  # The schema takes milliseconds to make, and a client with a mistake repeats it.
def _fields_of(kind: type[pydantic.BaseModel]) -> Fields:
    inner = kind.model_json_schema().get("$defs", {})
    own, *further = (keys_of(kind).get(""), *(names for place, names in keys_of(kind).items() if place))
    names = {*_names_in(inner), *(name for each in further if each is not None for name in each)}
    return Fields(frozenset(kind.model_fields) | frozenset(own or ()), frozenset(names), refused_of(kind))


def refused_of(kind: type[pydantic.BaseModel]) -> dict[str, str]:
    """The parameters that are known and refused, and why."""
    return REFUSED | next((more for name, more in _REFUSED_OF.items() if name in kind.model_fields), {})


def _names_in(schema: Any) -> set[str]:
    if isinstance(schema, list):
        return {name for part in schema for name in _names_in(part)}
    if not isinstance(schema, dict):
        return set()
    names = set(schema["properties"]) if isinstance(schema.get("properties"), dict) else set()
    return names | {name for part in schema.values() for name in _names_in(part)}
