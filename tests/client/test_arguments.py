"""Wrong arguments are refused by name before anything is sent, and unknown ones by the type checker as well."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import typing
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from backend.api.guide import GuideType
from client.async_client import AsyncEverbatchClient
from client.client import EverbatchClient
from client.conversation import Conversation
from client.guide import GUIDE_TYPES, Guide
from client.messages import GenerateRequest, Session
from client.options import GenerateOptions

NOBODY = "127.0.0.1:9"  # nothing may be sent
WRONG_TYPES = [
    ({"prompt": 5}, "prompt is an int, a str is expected"),
    ({"prompt": b"x"}, "prompt is a bytes, a str is expected"),
    ({"messages": "x"}, "messages is a str, a list of dict"),
    ({"messages": [["user", "x"]]}, r"messages\[0\] is a list, a dict"),
    ({"messages": [{"role": "user", "content": {1}}]}, "messages hold a value that JSON cannot say"),
    ({"max_tokens": "5"}, "max_tokens is a str, an int is expected"),
    ({"max_tokens": 5.0}, "max_tokens is a float, an int is expected"),
    ({"max_tokens": None}, "max_tokens is None, an int is expected"),
    ({"temperature": "0"}, "temperature is a str, a number is expected"),
    ({"temperature": True}, "temperature is a bool, a number is expected"),
    ({"seed": 1.5}, "seed is a float, an int is expected"),
    ({"stop_words": "end"}, "stop_words is a str, a list of str is expected"),
    ({"bad_words": ["a", 5]}, r"bad_words\[1\] is an int, a str is expected"),
    ({"stream": 1}, "stream is an int, a bool is expected"),
    ({"session": 7}, "session is an int, a Session is expected"),
    ({"session": Session("7")}, r"session\.id is a str, an int is expected"),  # type: ignore[arg-type]
    ({"session": Session(7, start=1)}, r"session\.start is an int, a bool is expected"),  # type: ignore[arg-type]
    ({"lora_name": 7}, "lora_name is an int, a str is expected"),
    ({"guide": "json"}, "guide is a str, a Guide is expected"),
    ({"guide": Guide(5)}, r"guide\.type is an int, a str is expected"),  # type: ignore[arg-type]
    ({"guide": Guide("regex", {"a": 1})}, r"guide\.text is a dict, for type regex a str is expected"),
    ({"guide": Guide("json_schema", {"a": {1}})}, r"guide\.text holds a value that JSON cannot say"),
    ({"guide": Guide("regex", 5)}, r"guide\.text is an int, a str is expected"),  # type: ignore[arg-type]
    ({"namespace": 5}, "namespace is an int, a str is expected"),
    ({"timeout_s": "1"}, "timeout_s is a str, a number of seconds is expected"),
    ({"request_id": 5}, "request_id is an int, a str is expected"),
    ({"max_token": 5}, "'max_token' is no option; did you mean max_tokens?"),
    ({"xyz": 5}, "'xyz' is no option; there are max_tokens, temperature"),
]
WRONG_VALUES = [
    ({"seed": -1}, "seed is -1, allowed is 0 to"),
    ({"session": Session(2**64)}, r"session\.id is 18446744073709551616, allowed is 0 to"),
    ({"guide": Guide("xml", "x")}, r"guide\.type is 'xml', allowed are json, json_schema, regex,"),  # type: ignore[arg-type]
    ({"guide": Guide("regex")}, r"guide\.text is empty beside type regex; give one"),
    ({"guide": Guide("json", "{}")}, r"guide\.text is a text beside type json; give none, or type json_schema"),
    ({"timeout_s": 0}, "timeout_s is 0, more than 0"),
    ({"timeout_s": float("nan")}, "timeout_s is nan"),
    ({"timeout_s": float("inf")}, "timeout_s is inf"),
    ({"request_id": "r" * 257}, "request_id has 257 characters, the limit is 256"),
]


def call(client: EverbatchClient | AsyncEverbatchClient, method: str, arguments: dict[str, Any]) -> None:
    given = {**({} if "messages" in arguments else {"prompt": "x"}), **arguments}
    answer: Any = getattr(client, method)(**given)
    if inspect.iscoroutine(answer):
        asyncio.run(answer)


@pytest.mark.parametrize("method", ["generate", "stream"])
@pytest.mark.parametrize("client", [EverbatchClient(NOBODY), AsyncEverbatchClient(NOBODY)])
@pytest.mark.parametrize(("arguments", "words"), WRONG_TYPES)
def test_an_argument_of_another_type_is_named(
    client: EverbatchClient | AsyncEverbatchClient, method: str, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(TypeError, match=words):
        call(client, method, arguments)


@pytest.mark.parametrize("client", [EverbatchClient(NOBODY), AsyncEverbatchClient(NOBODY)])
@pytest.mark.parametrize(("arguments", "words"), WRONG_VALUES)
def test_an_argument_out_of_its_range_is_named(
    client: EverbatchClient | AsyncEverbatchClient, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        call(client, "generate", arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"model": 5}, TypeError, "model is an int, a str is expected"),
        ({"model": ""}, ValueError, "model is empty"),
        ({"namespace": None}, TypeError, "namespace is None, a str is expected"),
        ({"api_key": 5}, TypeError, "api_key is an int, a str is expected"),
        ({"timeout_s": -1}, ValueError, "timeout_s is -1"),
        ({"retry": 3}, TypeError, "retry is an int, a Retry is expected"),
        ({"url": "https://h", "ca_file": 5}, TypeError, "ca_file is an int, a path is expected"),
        ({"url": "https://h", "ca_file": "/nowhere"}, ValueError, "ca_file '/nowhere' cannot be read: No such file"),
        ({"url": "https://h", "ca_file": __file__}, ValueError, "holds no certificates in PEM form"),
        ({"url": "http://h", "ca_file": __file__}, ValueError, "http://h speaks no TLS; name it with https://"),
    ],
)
@pytest.mark.parametrize("kind", [EverbatchClient, AsyncEverbatchClient])
def test_an_argument_of_the_client_is_named(
    kind: Callable[..., object], arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        kind(**arguments)


def test_numbers_of_numpy_are_numbers() -> None:
    request = GenerateRequest("x", max_tokens=np.int64(5), temperature=np.float32(0.5))  # type: ignore[arg-type]
    assert request.json_body()["max_tokens"] == 5 and type(request.json_body()["max_tokens"]) is int
    assert type(request.json_body()["temperature"]) is float


def test_the_types_of_a_guide_are_the_server_s() -> None:
    assert GUIDE_TYPES == tuple(each.value for each in GuideType)


def test_the_options_are_the_fields_of_a_request() -> None:
    fields = {field.name for field in dataclasses.fields(GenerateRequest)} - {"prompt", "messages", "images"}
    assert set(GenerateOptions.__annotations__) == fields


@pytest.mark.parametrize("kind", [EverbatchClient, AsyncEverbatchClient])
@pytest.mark.parametrize("method", ["generate", "chat", "stream", "map", "conversation"])
def test_the_type_checker_knows_the_options_of_every_method(kind: type[Any], method: str) -> None:
    options = inspect.signature(getattr(kind, method)).parameters["options"]
    assert options.annotation == "Unpack[GenerateOptions]" and options.kind is options.VAR_KEYWORD


def test_it_knows_them_of_a_conversation_too() -> None:
    assert typing.get_type_hints(Conversation.__init__)["options"] == typing.Unpack[GenerateOptions]


@pytest.mark.parametrize("method", ["generate", "chat", "stream", "send", "map", "conversation", "close"])
def test_both_clients_have_the_same_methods_with_the_same_arguments(method: str) -> None:
    of_one, of_other = (inspect.signature(getattr(kind, method)) for kind in (EverbatchClient, AsyncEverbatchClient))
    assert of_one.parameters == of_other.parameters
    assert getattr(EverbatchClient, method).__doc__ and getattr(AsyncEverbatchClient, method).__doc__
