"""Dialect: how a model writes tool calls and its reasoning, with the readers of its answers."""

from __future__ import annotations

from typing import Any, NamedTuple

from gateway.errors import GatewayError
from gateway.formats import forms_asked
from gateway.messages import ChatRequest, Thinking
from gateway.parts import PartReader, PlainReader
from gateway.reasoning import HARMONY, REASONING_FORMATS, Marks, ReasoningReader, WithoutReasoning
from gateway.response_messages import Asking, ResponseRequest
from gateway.served import Served
from gateway.settings import Settings
from gateway.tool_formats.format import ToolFormat
from gateway.tool_formats.harmony import HarmonyReader
from gateway.tool_formats.reader import CallReader
from gateway.tool_formats.table import TOOL_FORMATS
from gateway.tools import form_of_tools, toolset

BUDGETS = (
    "thinking_budget",
    "thinking_token_budget",
    "max_reasoning_tokens",
)  # the names in Qwen's API, in vLLM and elsewhere


class Dialect(NamedTuple):
    tools: ToolFormat
    marks: Marks | None  # None: reasoning is not told apart

    @classmethod
    def of(cls, model: Settings | Served) -> Dialect:
        return cls(TOOL_FORMATS[model.tool_format].format, REASONING_FORMATS.get(model.reasoning_format))

    def reader(self, message: ChatRequest | ResponseRequest) -> PartReader | None:
        """The reader of one answer; None: the answer is content and nothing else."""
        asked = toolset(message)
        marks = None if message.separate_reasoning is False else self.marks
        reader: PartReader | None = None
        if marks is HARMONY:
            reader = HarmonyReader()
        else:
            if asked.may_be_called:
                callable = {one.name: one for one in asked.callable.values()}
                reader = CallReader(self.tools, callable, not forms_asked(message), asked.are_parallel)
            if marks is not None:
                reader = ReasoningReader(marks, reader or PlainReader())
        if reader is not None and message.include_reasoning is False:
            return WithoutReasoning(reader)
        return reader

    def fields(self, message: ChatRequest | ResponseRequest) -> dict[str, Any]:
        """The fields of the Triton model's request that this needs. Raises GatewayError."""
        budget = budget_of(message)
        visible = list(self.tools.special) if toolset(message).may_be_called else []
        fields: dict[str, Any] = {}
        if self.marks is None:
            if budget is not None:
                text = "the marks of this model's reasoning are not known, so it cannot have a budget; leave it out"
                raise GatewayError(400, text, _named_budget(message), "unsupported_parameter")
        else:
            visible += self.marks.special
            fields["reasoning"] = self._marks_for(message).field(budget)
        if visible:
            fields["visible_tokens"] = list(dict.fromkeys(visible))
        return fields

    def _marks_for(self, message: ChatRequest | Asking) -> Marks:
        """The marks with what follows the reasoning where a call has to be made."""
        assert self.marks is not None
        must_call = form_of_tools(message, self.tools) is not None
        return self.marks._replace(follow=self.tools.start) if must_call and self.tools.start else self.marks


DEFAULT = Dialect.of(Settings())


def budget_of(message: Thinking) -> int | None:
    """The most tokens of reasoning; None: no limit. Raises GatewayError for two names that differ."""
    given = {name: value for name in BUDGETS if (value := getattr(message, name)) is not None}
    if len(set(given.values())) > 1:
        first, second = list(given)[:2]
        text = f"{first} and {second} mean the same and differ; send one of them"
        raise GatewayError(400, text, first, "invalid_value")
    return next(iter(given.values()), None)


def _named_budget(message: Thinking) -> str:
    return next(name for name in BUDGETS if getattr(message, name) is not None)
