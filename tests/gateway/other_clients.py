"""Clients of other projects, each asking the endpoint a few times: `python other_clients.py NAME URL`, in a Python that has them.

The endpoint stands before tests/gateway/fake_triton.py, so that what a prompt says is the answer.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

HELLO = "Hello wörld 🌍!"
CALL = '<tool_call>{"name": "look", "arguments": {"place": "here"}}</tool_call>'
FORM = '{"name": "Ann", "age": 5}'


def langchain_openai(url: str) -> None:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def look(place: str) -> str:
        """Look somewhere."""
        return place

    for more in ({}, {"use_responses_api": True}):
        model = ChatOpenAI(
            base_url=f"{url}/v1", api_key="none", model="everbatch", max_retries=0, stream_usage=True, **more
        )
        answer = model.invoke([("system", "Be brief."), ("human", "Say hello.")])
        assert answer.text == HELLO and answer.usage_metadata["output_tokens"] == 4, answer
        assert "".join(part.text for part in model.stream("Say hello.")) == HELLO
        called = model.bind_tools([look]).invoke(f"say {CALL}")
        assert called.tool_calls[0]["args"] == {"place": "here"}, called
        assert model.with_structured_output(_form()).invoke(f"say {FORM}").age == 5


def langchain_anthropic(url: str) -> None:
    from langchain_anthropic import ChatAnthropic
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    @tool
    def look(place: str) -> str:
        """Look somewhere."""
        return place

    model = ChatAnthropic(base_url=url, api_key="none", model="everbatch", max_retries=0, max_tokens=100)
    answer = model.invoke([("system", "Be brief."), ("human", "Say hello.")])
    assert answer.text == HELLO and answer.usage_metadata["input_tokens"] == 7, answer
    assert answer.usage_metadata["input_token_details"]["cache_read"] == 3, answer
    assert "".join(part.text for part in model.stream("Say hello.")) == HELLO
    asked = HumanMessage(f"say {CALL}")
    called = model.bind_tools([look]).invoke([asked])
    assert called.tool_calls[0]["args"] == {"place": "here"}, called
    result = ToolMessage("nothing", tool_call_id=called.tool_calls[0]["id"])
    assert model.bind_tools([look]).invoke([asked, called, result]).text == HELLO


def llama_index(url: str) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    def look(place: str) -> str:
        """Look somewhere."""
        return place

    options: Any = {"is_chat_model": True, "is_function_calling_model": True, "max_retries": 0}
    model = OpenAILike(model="everbatch", api_base=f"{url}/v1", api_key="none", **options)
    assert model.chat([ChatMessage("Say hello.")]).message.content == HELLO
    assert "".join(part.delta or "" for part in model.stream_chat([ChatMessage("Say hello.")])) == HELLO
    called = model.chat_with_tools([FunctionTool.from_defaults(look)], f"say {CALL}")
    (call,) = model.get_tool_calls_from_response(called)
    assert call.tool_kwargs == {"place": "here"}, call
    plain = OpenAILike(model="everbatch", api_base=f"{url}/v1", api_key="none", max_retries=0)
    assert plain.complete("Say hello.").text == HELLO


def litellm(url: str) -> None:
    import litellm

    turns = [{"role": "user", "content": "Say hello."}]
    for name, base in (
        ("openai/everbatch", f"{url}/v1"),
        ("hosted_vllm/everbatch", f"{url}/v1"),
        ("anthropic/everbatch", url),
    ):
        given: Any = {"model": name, "api_base": base, "api_key": "none", "messages": turns, "max_tokens": 50}
        answer = litellm.completion(**given)
        assert answer.choices[0].message.content == HELLO and answer.usage.prompt_tokens == 7, answer
        parts = [part.choices[0].delta.content or "" for part in litellm.completion(**given, stream=True)]
        assert "".join(parts) == HELLO, parts
        tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
        called = litellm.completion(**{**given, "messages": [{"role": "user", "content": f"say {CALL}"}]}, tools=[tool])
        assert called.choices[0].message.tool_calls[0].function.name == "look", called


def instructor(url: str) -> None:
    import anthropic
    import instructor
    import openai

    kind = _form()
    for mode in (instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
        client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode)
        found = client.create(
            model="everbatch",
            response_model=kind,
            max_retries=0,
            messages=[{"role": "user", "content": _said(mode is instructor.Mode.TOOLS)}],
        )
        assert found.age == 5, (mode, found)
    own = instructor.from_anthropic(anthropic.Anthropic(base_url=url, api_key="none", max_retries=0))
    found = own.create(
        model="everbatch",
        response_model=kind,
        max_tokens=50,
        max_retries=0,
        messages=[{"role": "user", "content": _said(True)}],
    )
    assert found.name == "Ann", found


def pydantic_ai(url: str) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    models = [
        OpenAIChatModel("everbatch", provider=provider),
        OpenAIResponsesModel("everbatch", provider=provider),
        AnthropicModel("everbatch", provider=AnthropicProvider(base_url=url, api_key="none")),
    ]

    async def ask(model: Any) -> None:
        agent = Agent(model, system_prompt="Be brief.")
        assert (await agent.run("Say hello.")).output == HELLO
        async with agent.run_stream("Say hello.") as streamed:
            assert await streamed.get_output() == HELLO
        places: list[str] = []

        @agent.tool_plain
        def look(place: str) -> str:
            places.append(place)
            return "nothing"

        assert (await agent.run(f"say {CALL}")).output == HELLO and places == ["here"]

    for model in models:
        asyncio.run(ask(model))


def _said(in_call: bool) -> str:
    return f'say <tool_call>{{"name": "Person", "arguments": {FORM}}}</tool_call>' if in_call else f"say {FORM}"


def _form() -> Any:
    from pydantic import BaseModel

    class Person(BaseModel):
        """A person."""

        name: str
        age: int

    return Person


def ollama(url: str) -> None:
    from ollama import Client, ResponseError

    client, say = Client(url), lambda text: [{"role": "user", "content": text}]
    assert [model.model for model in client.list().models] == ["everbatch"] == [one.name for one in client.ps().models]
    assert client.show("everbatch").capabilities == ["completion", "tools", "insert"]
    answer = client.chat("everbatch:latest", say("hi"), options={"temperature": 0, "num_ctx": 4096}, keep_alive="5m")
    assert answer.message.content == HELLO and answer.eval_count == 4 and answer.done_reason == "stop"
    assert "".join(part.message.content or "" for part in client.chat("everbatch", say("hi"), stream=True)) == HELLO

    def look(place: str) -> str:
        """Look somewhere.

        Args:
          place: where
        """
        return place

    called = client.chat("everbatch", say(f"say {CALL}"), tools=[look]).message
    assert called.tool_calls is not None and called.tool_calls[0].function.arguments == {"place": "here"}
    result = {"role": "tool", "tool_name": "look", "content": "nothing"}
    assert client.chat("everbatch", [*say("a"), called, result], tools=[look]).message.content == HELLO
    assert client.chat("everbatch", say(f"say {FORM}"), format=_form().model_json_schema()).message.content == FORM
    assert client.generate("everbatch", "a", suffix="b").response == HELLO
    assert client.embed("everbatch", ["a", "bc"]).embeddings[1][0] == 2
    try:
        client.pull("llama3")
    except ResponseError as error:
        assert error.status_code == 400 and "are not pulled here" in error.error
    else:
        raise AssertionError("a pull is refused")


def langchain_ollama(url: str) -> None:
    from langchain_ollama import ChatOllama, OllamaEmbeddings

    model = ChatOllama(base_url=url, model="everbatch", num_ctx=4096, validate_model_on_init=True)
    answer = model.invoke("Say hello.")
    assert answer.text == HELLO and answer.usage_metadata is not None and answer.usage_metadata["output_tokens"] == 4
    assert model.with_structured_output(_form(), method="json_schema").invoke(f"say {FORM}").age == 5
    assert OllamaEmbeddings(base_url=url, model="everbatch").embed_query("abc")[0] == 3


CLIENTS = {
    function.__name__: function
    for function in (
        *(langchain_openai, langchain_anthropic, llama_index, litellm, instructor, pydantic_ai),
        *(ollama, langchain_ollama),
    )
}

if __name__ == "__main__":
    CLIENTS[sys.argv[1]](sys.argv[2])
