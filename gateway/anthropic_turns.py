"""Requests of /v1/messages as chats. Pure functions; GatewayError(400) names what cannot be served.

blocks of text             one text, an empty line between two of them; those of an answer follow each other directly
image                      an image between the texts
tool_use                   a call of the answer that it stands in
tool_result                a turn of role tool; with is_error its text begins with "Error: "
thinking                   the reasoning of the answer
two turns of one role      one turn
an answer as last turn     the model goes on with its text
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from gateway import translate
from gateway.anthropic_messages import (
    AnyBlock,
    Base64Source,
    CountTokensRequest,
    CustomTool,
    ImageBlock,
    MessagesRequest,
    RedactedThinkingBlock,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from gateway.dialect import Dialect
from gateway.errors import GatewayError
from gateway.images import Picture, content_of
from gateway.messages import ChatRequest, Function, FunctionChoice, JsonSchema, JsonSchemaFormat, Tool, ToolChoice
from gateway.origin import GuideOrigin
from gateway.translate import Asked

PARAGRAPH = "\n\n"  # between blocks of text of one turn
ACCOUNTS = "x-anthropic-billing-header:"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_ONLY_OF = {ToolUseBlock: "assistant", ThinkingBlock: "assistant", RedactedThinkingBlock: "assistant"}
_ONLY_OF |= {ToolResultBlock: "user", SearchResultBlock: "user", ImageBlock: "user"}
_FIELDS = {
    "response_format.json_schema.schema": "output_config.format.schema"
}  # one thing in chat completions and here


def messages(message: MessagesRequest, chat: ChatRequest, dialect: Dialect) -> Asked:
    """The request of the Triton model; `chat` is what `as_chat` has made of the message."""
    asked = translate.chat(chat, dialect)
    request = {**asked.request, **conversation(message), "tell_prompt": "counts"}
    return Asked(request, None if asked.origin is None else _own_names(asked.origin))


def counting(message: CountTokensRequest, dialect: Dialect) -> Asked:
    """The request that only tells the tokens of the prompt."""
    chat = as_chat(message, dialect)
    return Asked({**translate.conversation(chat), **conversation(message), "tokenize": True}, None)


def conversation(message: CountTokensRequest) -> dict[str, Any]:
    """The turns for the chat template. Raises GatewayError."""
    found: dict[str, Any] = {"messages": turns_of(message)}
    last = message.messages[-1]
    if last.role == "assistant":
        if not isinstance(last.content, str) and any(isinstance(block, ToolUseBlock) for block in last.content):
            text = "the last message calls a tool and nothing answers it; send a user message with its tool_result"
            raise _refused(text, f"messages[{len(message.messages) - 1}]")
        found["continue_final_message"] = True
    return found


def as_chat(message: CountTokensRequest, dialect: Dialect) -> ChatRequest:
    """Everything but the turns. Raises GatewayError."""
    given: dict[str, Any] = {"model": message.model, "messages": [], **_tools(message), **_reasoning(message, dialect)}
    given["chat_template_kwargs"] = message.chat_template_kwargs
    if message.output_config is not None and (format := message.output_config.format) is not None:
        schema = JsonSchema.model_construct(name="output", schema_=format.schema_)
        given["response_format"] = JsonSchemaFormat.model_construct(type="json_schema", json_schema=schema)
    if isinstance(message, MessagesRequest):
        given |= {name: getattr(message, name) for name in ("max_tokens", "temperature", "top_p", "top_k", "stream")}
        given["stop"] = message.stop_sequences
    return ChatRequest.model_construct(**given)


def _reasoning(message: CountTokensRequest, dialect: Dialect) -> dict[str, Any]:
    """The fields that say how much the model reasons. A budget has an effect only where the format of the reasoning is known;
    elsewhere it is dropped, because clients send one to every model. Raises GatewayError.
    """
    found: dict[str, Any] = {}
    thinking = message.thinking
    if thinking is not None and thinking.type != "adaptive":
        is_on = found["enable_thinking"] = thinking.type == "enabled"
        if is_on and thinking.budget_tokens is None:
            raise _refused("thinking of type enabled has no budget_tokens; give it some, or say adaptive", "thinking")
        if is_on and dialect.marks is not None:
            found["thinking_budget"] = thinking.budget_tokens
        found["include_reasoning"] = is_on
    if message.output_config is not None and (effort := message.output_config.effort) is not None:
        found["reasoning_effort"] = effort
    return found


def _tools(message: CountTokensRequest) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if message.tools:
        found["tools"] = [_tool(tool) for tool in message.tools]
    choice = message.tool_choice
    if choice is None:
        return found
    if choice.type == "tool":
        if choice.name is None:
            raise _refused("tool_choice of type tool has no name; say which tool, or use the type any", "tool_choice")
        chosen = FunctionChoice.model_construct(name=choice.name)
        found["tool_choice"] = ToolChoice.model_construct(type="function", function=chosen)
    else:
        found["tool_choice"] = _CHOICES[choice.type]
    if choice.disable_parallel_tool_use:
        found["parallel_tool_calls"] = False
    return found


def _tool(tool: CustomTool) -> Tool:
    function = Function.model_construct(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
    return Tool.model_construct(type="function", function=function)


def _own_names(origin: GuideOrigin) -> GuideOrigin:
    """The fields of a guide by the names that they have here."""
    structures = tuple(name.replace(".function.parameters", ".input_schema") for name in origin.structures)
    return replace(origin, field=_FIELDS.get(origin.field, origin.field), structures=structures)


@dataclass
class _Turn:
    """A turn that grows. Its texts are joined once, so that many small blocks cost no more than a large one."""

    role: str
    parts: list[str | Picture] = field(default_factory=list)  # texts and images
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    answers: str | None = None  # the id of the call whose result it is

    def add(self, block: AnyBlock, where: str) -> None:
        """`where`: the field that holds the block."""
        match block:
            case TextBlock() | SearchResultBlock() | ImageBlock():
                self.parts.append(_part(block, where))
            case ThinkingBlock():
                self.reasoning.append(block.thinking)
            case ToolUseBlock():
                function = {"name": block.name, "arguments": block.input}
                self.calls.append({"id": block.id, "type": "function", "function": function})

    def shown(self) -> dict[str, Any]:
        """As chat templates know it: an answer's calls follow its text."""
        own: dict[str, Any] = {"role": self.role}
        own["content"] = content_of(self.parts, "" if self.role == "assistant" else PARAGRAPH)
        if self.reasoning:
            own["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            own["tool_calls"] = self.calls
        return own if self.answers is None else {**own, "tool_call_id": self.answers}


def turns_of(message: CountTokensRequest) -> list[dict[str, Any]]:
    """The turns of a chat. Raises GatewayError for a block in a turn of another role."""
    turns: list[_Turn] = []
    if system := _system(message):
        turns.append(_Turn("system", [system]))
    for index, given in enumerate(message.messages):
        if isinstance(given.content, str):
            _open(turns, given.role).parts.append(given.content)
            continue
        if given.role == "assistant" and not given.content:
            _open(turns, given.role)
        for number, block in enumerate(given.content):
            where = f"messages[{index}].content[{number}]"
            _check_role(block, given.role, where)
            if isinstance(block, ToolResultBlock):
                turns.append(_Turn("tool", _result(block, where), answers=block.tool_use_id))
            else:
                _open(turns, given.role).add(block, where)
    return [turn.shown() for turn in turns]


def _system(message: CountTokensRequest) -> str:
    """The system prompt, without the block of accounts that Claude Code puts in front of it: no text for a model, and another one
    with each request, so that no request would find the KV of the one before.
    """
    given = message.system or ""
    if isinstance(given, str):
        return given
    return PARAGRAPH.join(one.text for one in given if not one.text.startswith(ACCOUNTS))


def _open(turns: list[_Turn], role: str) -> _Turn:
    """The turn that a block of this role belongs to: the last one, or a new one."""
    if not turns or turns[-1].role != role:
        turns.append(_Turn(role))
    return turns[-1]


def _check_role(block: AnyBlock, role: str, where: str) -> None:
    if (right := _ONLY_OF.get(type(block), role)) != role:
        text = f"{where} is a block of type {block.type} in a message of role {role}; send it in one of role {right}"
        raise _refused(text, where)


def _result(block: ToolResultBlock, where: str) -> list[str | Picture]:
    """The texts and images of a result."""
    if block.content is None or isinstance(block.content, str):
        parts: list[str | Picture] = [block.content or ""]
    else:
        parts = [_part(one, f"{where}.content[{number}]") for number, one in enumerate(block.content)]
    if block.is_error:
        first = parts[0] if parts and isinstance(parts[0], str) else None
        parts = ["Error: ", *parts] if first is None else [f"Error: {first}", *parts[1:]]
    return parts


def _part(block: TextBlock | SearchResultBlock | ImageBlock, where: str) -> str | Picture:
    if isinstance(block, TextBlock):
        return block.text
    if isinstance(block, ImageBlock):
        source = block.source
        if isinstance(source, Base64Source):
            return Picture(f"{where}.source.data", data=source.data)
        return Picture(f"{where}.source.url", source.url)
    return "\n".join((block.title, block.source, *(part.text for part in block.content)))


def _refused(text: str, param: str) -> GatewayError:
    return GatewayError(400, text, param, "invalid_value")


def wants_caching(message: CountTokensRequest) -> bool:
    """True if a cache_control stands anywhere in the request."""
    marked: list[Any] = [message, *(message.tools or [])]
    marked += [] if isinstance(message.system, str) else message.system or []
    for turn in message.messages:
        for block in [] if isinstance(turn.content, str) else turn.content:
            marked.append(block)
            if isinstance(block, ToolResultBlock) and not isinstance(block.content, str):
                marked += block.content or []
    return any(one.cache_control is not None for one in marked)
